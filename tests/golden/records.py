#!/usr/bin/env python3
"""Compares the committed records with what the library writes and with what a second reader reads.

    records.py WRITE_RECORDS RECORDS [FEATURES...]

TAP. For each mask of instruction sets: the program's output, record by record, equals the file. Then each record is decoded
by reader.py and its rows equal the committed ones.
"""
import pathlib
import struct
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import reader


def split(text):
    return ["record " + piece for piece in text.split("record ")[1:]]


def parse(text):
    fields = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        fields[name] = rest
    return fields


def numbers(text):
    return {name: float(value) if "." in value else int(value) for name, value in (pair.split("=") for pair in text.split())}


def rows_match(fields):
    is_projected = "projected" in fields
    shape, part = numbers(fields["projected" if is_projected else "shape"]), bytes.fromhex(fields["part"])
    if "counts" in fields and sum(bytes.fromhex(fields["counts"])) != shape["tokens"]:
        return "counts of a router key"
    epoch = reader.Epoch(bytes.fromhex(fields["epoch"]), shape["dim"]) if "epoch" in fields else None
    rotary = None
    if "rotary" in fields:
        rotary = numbers(fields["rotary"])
        data = bytes.fromhex(fields["inverse_frequencies"])
        rotary["inverse_frequencies"] = struct.unpack(f"<{len(data) // 4}f", data)
    rows = reader.read_projected(shape, part) if is_projected else reader.read(shape, part, epoch, rotary)
    read = [number for row in rows for number in row]
    data = bytes.fromhex(fields["rows"])
    expected = struct.unpack(f"<{len(data) // 4}f", data)
    if len(read) != len(expected):
        return "number of elements"
    width = shape["rank" if is_projected else "dim"]
    for i, (a, b) in enumerate(zip(read, expected)):
        if a != b:
            return f"row {i // width} channel {i % width}: read {a!r}, committed {b!r}"
    return ""


def main():
    program, path, masks = sys.argv[1], sys.argv[2], sys.argv[3:] or ["0"]
    text = pathlib.Path(path).read_text()
    committed = split(text)
    results = [(len(committed) >= 90, "there are records", "")]
    for mask in masks:
        run = subprocess.run([program, mask], stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode == 77:
            results.append((True, f"features {mask} # SKIP not on this machine", ""))
            continue
        written = split(run.stdout)
        results.append((run.returncode == 0 and len(written) == len(committed), f"features {mask}: all records written", ""))
        for i, (a, b) in enumerate(zip(written, committed)):
            results.append((a == b, f"features {mask}: record {i} as committed", "bytes differ"))
    for i, record in enumerate(committed):
        problem = rows_match(parse(record))
        results.append((not problem, f"second reader: record {i}", problem))
    print(f"1..{len(results)}")
    for number, (ok, name, problem) in enumerate(results, 1):
        print(f"{'ok' if ok else 'not ok'} {number} - {name}")
        if not ok:
            print(f"# {problem}")
    return 0 if all(ok for ok, _, _ in results) else 1


sys.exit(main())
