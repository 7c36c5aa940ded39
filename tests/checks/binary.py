#!/usr/bin/env python3
"""What the built library needs and what runs when it is loaded.

    binary.py SHARED_LIBRARY INTERNAL_ARCHIVE...
"""
import re
import subprocess
import sys

from tap import Tap

library, archives = sys.argv[1], sys.argv[2:]
tap = Tap()


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", run("readelf", "-d", "-W", library))
allowed = re.compile(r"(libc|libgcc_s|libm|libpthread|libdl|ld-linux[\w-]*)\.so(\.\d+)?$")
tap.check(needed and all(allowed.match(name) for name in needed), "needs the C library and the unwinder alone", needed)
flags = run("readelf", "-d", "-W", library)
tap.check("TEXTREL" not in flags, "has no text relocations")
tap.check(re.search(r"BIND_NOW|FLAGS_1.*NOW", flags), "binds at load time")
stack = re.search(r"GNU_STACK.*", run("readelf", "-l", "-W", library))
tap.check(stack and "RWE" not in stack.group(0), "has no executable stack")

# In the library itself: what the compiler's start files and the static C++ run time bring along, and nothing else.
init_names = set()
symbols = {int(row.split()[1], 16): row.split()[7] for row in run("readelf", "-s", "-W", library).splitlines()
           if len(row.split()) >= 8 and row.split()[3] == "FUNC"}
section = re.search(r"\.init_array\s+\w+\s+([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)", run("readelf", "-S", "-W", library))
if section:
    start, size = int(section.group(1), 16), int(section.group(2), 16)
    for row in run("readelf", "-r", "-W", library).splitlines():
        words = row.split()
        if len(words) >= 4 and re.fullmatch(r"[0-9a-f]+", words[0]) and start <= int(words[0], 16) < start + size:
            init_names.add(symbols.get(int(words[-1], 16), words[-1]))
tap.check(all(re.match(r"frame_dummy|_GLOBAL__sub_I__ZN9__gnu_cxx9__freeres|init_cpu_indicator|init_have_lse", n)
              or "eh_alloc" in n for n in init_names),
          "runs no constructor of its own when loaded", sorted(init_names))

# Functions that would print, end the process, read the environment or touch process-wide state.
forbidden = re.compile(
    r"(abort|_?exit|_Exit|quick_exit|getenv|secure_getenv|setenv|chdir|fchdir|signal|sigaction|system|popen|fork|"
    r"v?printf|puts|putchar|perror|fputs|v?fprintf|stdout|stderr|setlocale|strtok|rand|srand|sigprocmask|"
    r"__cxa_thread_atexit|_ZSt4cout|_ZSt4cerr|_ZNSt8ios_base\w*|_ZNSt10filesystem\w*|_ZNKSt9type_info\w*)(@.*)?$")
for archive in archives:
    name = archive.rsplit("/", 1)[-1]
    sections = run("readelf", "-S", "-W", archive)
    constructors = re.findall(r"\.(?:init_array|ctors|preinit_array)\S*", sections)
    tap.check(not constructors, f"{name}: no static constructors", constructors)
    used = set()
    for row in run("nm", "--undefined-only", archive).splitlines():
        words = row.split()
        if len(words) == 2 and forbidden.match(words[1]):
            used.add(words[1])
    tap.check(not used, f"{name}: calls nothing that prints, exits or touches the process", sorted(used))
    foreign = []
    for row in run("nm", "-C", "--defined-only", "--extern-only", archive).splitlines():
        words = row.split(None, 2)
        if len(words) == 3 and words[1] in "TDBRVWu" and not re.search(
                r"\bskerry(x?_|::)|^(std|__gnu_cxx|void std|operator|DW\.ref|typeinfo|vtable)", words[2]):
            foreign.append(words[2])
    tap.check(not foreign, f"{name}: global names start with skerry_ or are in namespace skerry", foreign)
tap.end()
