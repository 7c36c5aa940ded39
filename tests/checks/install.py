#!/usr/bin/env python3
"""What `meson install` puts down is complete: a program elsewhere finds it through pkg-config, builds and runs.

    install.py BUILD_DIRECTORY INCLUDE_DIRECTORY C_COMPILER
"""
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

from tap import Tap

build, include, compiler = sys.argv[1], pathlib.Path(sys.argv[2]), shlex.split(sys.argv[3])
tap = Tap()

PROGRAM = """
#include <skerry/skerry.h>
int main(void) {
    skerry_context *context = NULL;
    if (!SKERRY_VERSION_CHECK() || skerry_context_create(NULL, &context, NULL) != SKERRY_OK) return 1;
    skerry_context_release(context);
    return 0;
}
"""

with tempfile.TemporaryDirectory() as folder:
    result = subprocess.run(["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", folder],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    tap.check(result.returncode == 0, "installs", result.stdout.splitlines())
    files = {path.name: path for path in pathlib.Path(folder).rglob("*") if path.is_file()}

    wrong = [header.name for header in sorted((include / "skerry").iterdir())
             if header.name not in files or files[header.name].read_bytes() != header.read_bytes()]
    tap.check(not wrong, "every public header is installed as it is", wrong)
    tap.check("libskerry.so" in files and files["libskerry.so"].is_symlink(), "the linker's name is a link", files)

    if "skerry.pc" not in files:
        tap.check(False, "there is a pkg-config file")
    else:
        environment = dict(os.environ, PKG_CONFIG_PATH=str(files["skerry.pc"].parent), PKG_CONFIG_SYSROOT_DIR=folder)

        def ask(*question):
            return subprocess.run(["pkg-config", *question, "skerry"], env=environment, check=True,
                                  stdout=subprocess.PIPE, text=True).stdout.split()

        source, program = pathlib.Path(folder) / "use.c", pathlib.Path(folder) / "use"
        source.write_text(PROGRAM, encoding="utf-8")
        linked = subprocess.run([*compiler, "-std=c99", "-Wall", "-Werror", *ask("--cflags"), str(source), *ask("--libs"),
                                 "-o", str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        tap.check(linked.returncode == 0, "a program builds with what pkg-config says", linked.stdout.splitlines())
        if linked.returncode == 0:
            library_path = str(files["libskerry.so"].parent)
            ran = subprocess.run([str(program)], env=dict(os.environ, LD_LIBRARY_PATH=library_path))
            tap.check(ran.returncode == 0, "and runs")
tap.end()
