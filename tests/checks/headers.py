#!/usr/bin/env python3
"""Each public header stands alone in C99 and C++11, without a warning and without hidden padding.

    headers.py INCLUDE_DIRECTORY C_COMPILER C++_COMPILER
"""
import pathlib
import re
import shlex
import subprocess
import sys

from tap import Tap

include, c_compiler, cpp_compiler = pathlib.Path(sys.argv[1]), shlex.split(sys.argv[2]), shlex.split(sys.argv[3])
tap = Tap()
strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{include}"]


def compiles(command, text, language):
    result = subprocess.run([*command, *strict, "-x", language, "-"], input=text, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)
    return result.returncode == 0, result.stdout.splitlines()


headers = sorted((include / "skerry").rglob("*.h"))
tap.check(len(headers) >= 5, "public headers were found")
for header in headers:
    name = header.relative_to(include).as_posix()
    text = header.read_text(encoding="utf-8")
    twice = f"#include <{name}>\n#include <{name}>\nint main(void) {{ return 0; }}\n"
    for label, command, language in (
            ("C99", [*c_compiler, "-std=c99", "-Wpadded", "-Wstrict-prototypes", "-Wc++-compat"], "c"),
            ("C++11", [*cpp_compiler, "-std=c++11", "-Wpadded", "-Wold-style-cast"], "c++")):
        good, output = compiles(command, twice, language)
        tap.check(good, f"{name}: compiles alone as {label}", output)
    guard = re.sub(r"\W", "_", header.name).upper()
    if not guard.startswith("SKERRY_"):
        guard = "SKERRY_" + guard
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).strip()
    tap.check(code.startswith(f"#ifndef {guard}\n#define {guard}\n") and code.endswith("#endif"),
              f"{name}: has the include guard {guard}")
    tap.check("//" not in re.sub(r"/\*.*?\*/|\"[^\"]*\"|https?://\S+", "", text, flags=re.DOTALL),
              f"{name}: has no C++ comments")
    banned = re.findall(r"\b(bool|_Bool|long|FILE|va_list|union|wchar_t)\b|#\s*include\s*<(?!skerry/|stddef|stdint)[^>]*>",
                        code)
    tap.check(not banned, f"{name}: uses only the border's types and headers", banned)
    functions = re.findall(r"^SKERRY_API(?:_\w+)? [^;{}#]*\(", code, flags=re.MULTILINE)
    tap.check(not functions or 'extern "C" {' in code, f"{name}: has C linkage")

for header in sorted((include / "skerry").rglob("*.hpp")):
    name = header.relative_to(include).as_posix()
    text = f"#include <{name}>\n#include <{name}>\nint main() {{ return 0; }}\n"
    for standard in ("c++11", "c++20"):
        good, output = compiles([*cpp_compiler, f"-std={standard}", "-Wshadow"], text, "c++")
        tap.check(good, f"{name}: compiles alone as {standard}", output)

umbrella = (include / "skerry" / "skerry.h").read_text(encoding="utf-8") if (include / "skerry/skerry.h").exists() else ""
stable = {h.name for h in headers if h.parent.name == "skerry"} - {"skerry.h", "backend.h", "cuda.h", "vulkan.h"}
missing = [name for name in sorted(stable) if f"<skerry/{name}>" not in umbrella]
tap.check(not missing, "the umbrella includes every stable header", missing)
tap.end()
