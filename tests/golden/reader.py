"""A second reader of Skerry's stored records, written from docs/format.md alone. Plain Python, one number at a time."""
import math
import struct

F32, F16, BF16, R2, R3, R4, R8, C2, C4, L32, L16, L8, L4 = 1, 2, 3, 8, 9, 10, 11, 16, 17, 24, 25, 26, 27
KEY, VALUE = 0, 1


def f32(x):
    """Rounds to the nearest f32. A sum, product or quotient of two f32 in Python's f64, rounded once more, is the f32 result."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def half(data, index):
    return struct.unpack_from("<e", data, 2 * index)[0]


def bfloat(data, index):
    return struct.unpack("<f", b"\0\0" + data[2 * index:2 * index + 2])[0]


class Epoch:
    def __init__(self, stored, dim):
        assert len(stored) == 4 + 3 * dim
        self.key_exponent, self.value_exponent, zero_a, zero_b = struct.unpack_from("<bbBB", stored)
        assert zero_a == zero_b == 0
        self.mean = [f32(half(stored[4:], c) * 2.0 ** self.key_exponent) for c in range(dim)]
        sixteenths = struct.unpack_from(f"<{dim}b", stored, 4 + 2 * dim)
        self.balance = [f32(f32(2.0 ** ((s & 15) / 16)) * 2.0 ** (s >> 4)) for s in sixteenths]


def is_flipped(channel):
    h = (channel + 1) * 0x9E3779B1 & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 0x85EBCA77 & 0xFFFFFFFF
    return h >> 31 == 1


def key_plane(plane, bits, dim, capacity, token, channel):
    n = 8 // bits
    line, within = divmod(channel, 4 * n)
    j, b = divmod(within, 4)
    byte = plane[4 * (line * capacity + token) + b]
    return byte >> (bits * j) & ((1 << bits) - 1)


def value_plane(plane, bits, dim, capacity, token, channel):
    n = 8 // bits
    quads = -(-capacity // 4)
    block, within = divmod(channel, 16 * n)
    lanes = -(-min(16 * n, dim - 16 * n * block) // n)
    j, lane = divmod(within, lanes)
    byte = plane[4 * (16 * quads * block + lanes * (token // 4) + lane) + token % 4]
    return byte >> (bits * j) & ((1 << bits) - 1)


def plane_bytes(bits, side, dim, capacity):
    n = 8 // bits
    if side == KEY:
        return 4 * capacity * -(-dim // (4 * n))
    whole, rest = divmod(dim, 16 * n)
    return 4 * -(-capacity // 4) * (16 * whole + -(-rest // n))


def butterflies(row, n):
    distance = 1
    while distance < n:
        for i in range(len(row)):
            if i & distance == 0:
                row[i], row[i + distance] = row[i] + row[i + distance], row[i] - row[i + distance]
        distance *= 2


def read_r(shape, part, epoch):
    dim, capacity, side = shape["dim"], shape["capacity"], shape["side"]
    bits = {R2: 2, R3: 3, R4: 4, R8: 8}[shape["format"]]
    planes = [2, 1] if bits == 3 else [bits]
    take = key_plane if side == KEY else value_plane
    offset, parts, shift = 0, [], 0
    for width in planes:
        parts.append((part[offset:], width, shift))
        offset += plane_bytes(width, side, dim, capacity)
        shift += width
    assert len(part) == offset + 2 * capacity
    n = dim & -dim
    exponent = epoch.key_exponent if side == KEY else epoch.value_exponent
    rows = []
    for token in range(shape["count"]):
        row = [sum(take(p, w, dim, capacity, token, c) << s for p, w, s in parts) - ((1 << bits) - 1) / 2 for c in range(dim)]
        butterflies(row, n)
        scale = f32(f32(half(part[offset:], token) * 2.0 ** exponent) * f32(1 / math.sqrt(n)))
        for c in range(dim):
            sign = -1.0 if n > 1 and is_flipped(c) else 1.0
            if side == KEY:
                row[c] = f32(f32(f32(row[c] * scale) * f32(sign * f32(1 / epoch.balance[c]))) + epoch.mean[c])
            else:
                row[c] = f32(row[c] * scale) * sign
        rows.append(row)
    return rows


def read_full(shape, part):
    dim, capacity, count = shape["dim"], shape["capacity"], shape["count"]
    if shape["format"] == F32:
        element = lambda i: struct.unpack_from("<f", part, 4 * i)[0]
    else:
        element = (lambda i: half(part, i)) if shape["format"] == F16 else (lambda i: bfloat(part, i))
    if shape["side"] == KEY:
        return [[element(c * capacity + t) for c in range(dim)] for t in range(count)]
    return [[element(t * dim + c) for c in range(dim)] for t in range(count)]


def read_c(shape, part, rotary):
    dim, capacity, count, side = shape["dim"], shape["capacity"], shape["count"], shape["side"]
    bits = 2 if shape["format"] == C2 else 4
    per_byte, mask = 8 // bits, (1 << bits) - 1
    number, largest = (half, 65504.0) if shape["grid"] == 2 else (bfloat, 2.0 ** 128 - 2.0 ** 120)
    run, runs = (capacity, dim) if side == KEY else (dim, capacity)
    run_bytes = -(-run * bits // 8)
    group = shape["value_group"] or dim
    groups = 1 if side == KEY else -(-dim // group)
    scales = part[runs * run_bytes:]
    zeros = scales[2 * runs * groups:]
    assert len(zeros) == 2 * runs * groups

    def element(r, i):
        code = part[r * run_bytes + i // per_byte] >> (bits * (i % per_byte)) & mask
        grid = r if side == KEY else r * groups + i // group
        # The sum of two products with few digits is exact in f64 but for its last rounding.
        return f32(min(max(code * number(scales, grid) + number(zeros, grid), -largest), largest))

    if side == VALUE:
        return [[element(t, c) for c in range(dim)] for t in range(count)]
    rows = [[element(c, t) for c in range(dim)] for t in range(count)]
    if rotary is None:
        return rows
    pairs = rotary["dims"] // 2
    for t, row in enumerate(rows):
        for i in range(pairs):
            angle = f32((rotary["position"] + t) * rotary["inverse_frequencies"][i])
            cos = f32(f32(math.cos(angle)) * rotary["attention_factor"])
            sin = f32(f32(math.sin(angle)) * rotary["attention_factor"])
            a, b = (i, i + pairs) if rotary["pairing"] == 0 else (2 * i, 2 * i + 1)
            x, y = row[a], row[b]
            row[a] = f32(f32(x * cos) - f32(y * sin))
            row[b] = f32(f32(y * cos) + f32(x * sin))
    return rows


def read_l(shape, part):
    dim, capacity, rank, side = shape["dim"], shape["capacity"], shape["rank"], shape["side"]
    bits = {L32: 32, L16: 16, L8: 8, L4: 4}[shape["format"]]
    word = lambda n: -(-n // 4) * 4

    def array(data, rows, length):
        """Codes [rows][length] from the start of the data, and where the next array begins."""
        row_bytes = -(-length * bits // 8)

        def code(row, i):
            line = data[row * row_bytes:]
            if bits == 32:
                return struct.unpack_from("<f", line, 4 * i)[0]
            if bits == 16:
                return half(line, i)
            return struct.unpack_from("<b", line, i)[0] if bits == 8 else (line[i // 2] >> 4 * (i % 2) & 15) - 8
        return code, word(rows * row_bytes)

    if side == KEY:
        basis, after = array(part, dim, rank)
        tokens, more = array(part[after:], rank, capacity)
    else:
        basis, after = array(part, rank, dim)
        tokens, more = array(part[after:], capacity, rank)
    assert len(part) == after + more + 4 * rank
    scales = struct.unpack_from(f"<{rank}f", part, after + more)
    rows = []
    for t in range(shape["count"]):
        factors = [f32((tokens(k, t) if side == KEY else tokens(t, k)) * scales[k]) for k in range(rank)]
        row = []
        for c in range(dim):
            total = 0.0
            for k in range(rank):
                total = f32(total + f32(factors[k] * (basis(c, k) if side == KEY else basis(k, c))))
            row.append(total)
        rows.append(row)
    return rows


def read_projected(shape, part):
    """Vectors of one block of a router key."""
    rank, vectors = shape["rank"], shape["vectors"]
    per_word = 4 if rank <= 16 else 8
    scales = part[4 * vectors * -(-rank // per_word):]
    rows = []
    for v in range(vectors):
        row = []
        for i in range(rank):
            word, within = divmod(i, per_word)
            byte = part[4 * (word * vectors + v) + within % 4]
            code = byte - 256 * (byte > 127) if rank <= 16 else (byte >> 4 * (within // 4) & 15 ^ 8) - 8
            row.append(f32(code * half(scales, v)))
        rows.append(row)
    return rows


def read(shape, part, epoch=None, rotary=None):
    """Rows of one part: `shape` holds format, side, dim, capacity and count as integers, of C formats value_group and grid, of L formats rank."""
    if shape["format"] in (F32, F16, BF16):
        return read_full(shape, part)
    if shape["format"] in (C2, C4):
        return read_c(shape, part, rotary)
    if shape["format"] in (L32, L16, L8, L4):
        return read_l(shape, part)
    return read_r(shape, part, epoch)
