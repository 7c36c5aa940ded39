# SPDX-License-Identifier: MIT
"""Training and held-out texts from four Debian packages.

    python -m skerry.train.debian_texts FOLDER

fetches the packages with apt-get (nothing is installed), and writes

    FOLDER/train/      second halves of four novels of Jane Austen, three quarters of the Debian handbook, the Jargon File
    FOLDER/heldout/    Emma, Pride and Prejudice, the rest of the handbook, the Debian developer's reference

The excerpts of examples/data/ lie in the first halves of their novels, so no router trained on FOLDER/train has seen them.
"""

import argparse
import gzip
import html.parser
import pathlib
import re
import struct
import subprocess
import tarfile
import tempfile
import zlib

PACKAGES = ("r-cran-janeaustenr", "debian-handbook", "jargon-text", "developers-reference")
TRAIN_NOVELS = ("mansfieldpark", "northangerabbey", "persuasion", "sensesensibility")
HELDOUT_NOVELS = ("emma", "prideprejudice")
WANTED = r"janeaustenr/data/Rdata|html/en-US/sect\..*\.html$|jargon\.txt\.gz$|developers-reference\.txt\.gz$"
CHARSXP = 9  # R's type of one string
HELDOUT_EVERY = 4  # of the handbook's sections, every fourth


def unpack(archive, root):
    """The wanted files of a package; the handbook alone has 26 languages with pictures."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as unpacking:
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as files:
            for entry in files:
                if entry.isfile() and re.search(WANTED, entry.name):
                    path = root / entry.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(files.extractfile(entry).read())
    if unpacking.returncode:
        raise RuntimeError("dpkg-deb could not read " + archive.name)


def r_strings(stream):
    """The strings of one serialised character vector of R (XDR, version 2 or 3), without the names that may follow it.

    Facts of the format: R Internals, section "Serialization Formats".
    """
    if stream[:2] != b"X\n":
        raise ValueError("not an XDR serialisation of R")
    version = struct.unpack_from(">i", stream, 2)[0]
    at = 14 + (4 + struct.unpack_from(">i", stream, 14)[0] if version >= 3 else 0)
    kind, count = struct.unpack_from(">ii", stream, at)
    if kind & 0xff != 16:
        raise ValueError("expected a character vector, found type %d" % (kind & 0xff))
    at += 8
    out = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", stream, at)
        if flags & 0xff != CHARSXP:
            raise ValueError("expected a string, found type %d" % (flags & 0xff))
        at += 8
        out.append(stream[at:at + max(0, length)].decode("utf-8", "replace"))
        at += max(0, length)
    return out


def paragraphs(lines):
    """Lines joined to paragraphs, one a line; headings in capitals and chapter numbers left out."""
    out, current = [], []
    for line in list(lines) + [""]:
        line = line.strip()
        if line:
            current.append(line)
            continue
        text = " ".join(current)
        current = []
        if text and not re.match(r"(chapter|volume)\b", text, re.I) and text.upper() != text:
            out.append(text)
    return out


def novels(root):
    """{name: paragraphs} from R's lazy-load data base: entries of a 4-byte size and a zlib stream."""
    folder = root / "usr/lib/R/site-library/janeaustenr/data"
    index = zlib.decompress((folder / "Rdata.rdx").read_bytes(), 47)
    data = (folder / "Rdata.rdb").read_bytes()
    found = {}
    names = TRAIN_NOVELS + HELDOUT_NOVELS
    # The index lists (offset, length) pairs in the order of its names, each an integer vector of two.
    places = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{4})(.{4})", index, re.S)
    order = [n for n in re.findall(rb"\x00\x04\x00\x09\x00\x00\x00.([a-z]+)", index, re.S) if n.decode() in names]
    for name, (offset, length) in zip(order, places):
        begin, size = struct.unpack(">i", offset)[0], struct.unpack(">i", length)[0]
        found[name.decode()] = paragraphs(r_strings(zlib.decompress(data[begin + 4:begin + size])))
    missing = set(names) - set(found)
    if missing:
        raise ValueError("r-cran-janeaustenr lacks " + ", ".join(sorted(missing)))
    return found


class Paragraphs(html.parser.HTMLParser):
    """Text of paragraphs, list items and headings of a page."""

    BLOCKS = {"p", "li", "h1", "h2", "h3", "h4", "dt", "dd", "pre", "td"}
    SKIPPED = {"script", "style", "head"}

    def __init__(self):
        super().__init__()
        self.out, self.current, self.skipped = [], [], 0

    def flush(self):
        text = re.sub(r"\s+", " ", "".join(self.current)).strip()
        if text:
            self.out.append(text)
        self.current = []

    def handle_starttag(self, tag, attrs):
        self.skipped += tag in self.SKIPPED
        if tag in self.BLOCKS:
            self.flush()

    def handle_endtag(self, tag):
        self.skipped -= tag in self.SKIPPED
        if tag in self.BLOCKS:
            self.flush()

    def handle_data(self, data):
        if not self.skipped:
            self.current.append(data)


def pages(folder, pattern):
    """{page: paragraphs} of a folder of HTML, navigation left out."""
    out = {}
    for path in sorted(folder.glob(pattern)):
        parser = Paragraphs()
        parser.feed(path.read_text(encoding="utf-8"))
        parser.close()
        parser.flush()
        text = [p for p in parser.out if len(p) > 40]
        if sum(map(len, text)) > 4000:
            out[path.stem] = text
    return out


def plain(path):
    return paragraphs(gzip.decompress(path.read_bytes()).decode("utf-8", "replace").split("\n"))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="skerry.train.debian_texts", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    out = parser.parse_args(arguments).folder
    with tempfile.TemporaryDirectory() as place:
        root = pathlib.Path(place)
        # _apt, the user under which apt downloads, must be able to write there.
        root.chmod(0o777)
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=root, check=True)
        for archive in sorted(root.glob("*.deb")):
            unpack(archive, root)
        books = novels(root)
        for name in TRAIN_NOVELS:
            write(out / "train" / (name + ".txt"), books[name][len(books[name]) // 2:])
        for name in HELDOUT_NOVELS:
            write(out / "heldout" / (name + ".txt"), books[name])
        sections = pages(root / "usr/share/doc/debian-handbook/html/en-US", "sect.*.html")
        parts = {"train": [], "heldout": []}
        for number, text in enumerate(sections.values()):
            parts["heldout" if number % HELDOUT_EVERY == 0 else "train"] += text
        for part, text in parts.items():
            write(out / part / "handbook.txt", text)
        write(out / "train" / "jargon.txt", plain(root / "usr/share/doc/jargon-text/jargon.txt.gz"))
        reference = plain(root / "usr/share/developers-reference/developers-reference.txt.gz")
        write(out / "heldout" / "developers_reference.txt", reference)
    for path in sorted(out.glob("*/*.txt")):
        print("%-40s %8d bytes" % (path.relative_to(out), path.stat().st_size))


if __name__ == "__main__":
    main()
