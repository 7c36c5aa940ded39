"""Exit status 0 when every 'name==version' line of the file is installed for this interpreter."""
import importlib.metadata
import sys


def main(path):
    with open(path, encoding="utf-8") as lines:
        wanted = [line.split("#")[0].split(";")[0].strip() for line in lines]
    for requirement in filter(None, wanted):
        name, version = requirement.split("==")
        try:
            if importlib.metadata.version(name) != version:
                return 1
        except importlib.metadata.PackageNotFoundError:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
