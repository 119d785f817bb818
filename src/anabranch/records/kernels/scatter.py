"""Record batches scattered by key into several targets in one pass, as `records.filtering` does in plain Python.

Of every batch a target is given a batch with the header of the original, but for its length, codec, record count and
checksum, and with those records that the target wants, byte for byte; nothing where it wants none. Control batches are
given to all. A record is moved as soon as its key is hashed, so each byte is read once while it is near.

A batch that is given on has a new checksum, so the one that it had is looked at, too: what has changed since it was
written must not pass for sound.

Long records need not be moved to where they are sent from: a target is then given PIECES, which say where its bytes are
in the order in which they are sent. Then a checksum is taken of each record, once, and those of all batches that it is
part of are joined from these: that of the original, which is compared when its records are through, and that of what a
target is given. Nothing of a batch is given before that.

Compiled ahead of time as `examine` is (`ahead`), but for processors with an instruction for CRC-32C, or with
multiplication without carries: without them, CHECKSUMS is False and the caller takes the checksums.
"""

from __future__ import annotations

from anabranch.records.batch import CONTROL, HEADER_SIZE, LENGTH_END, MAGIC
from anabranch.records.compression import COMPRESSION_MASK
from anabranch.records.kernels.compiled import inlined, kernel
from anabranch.records.kernels.crc32c import (
    CHECKS_CRC,
    CRC_FROM,
    FOLDS_CRC,
    JOINS_CRC,
    LATE_AT,
    LATE_SIZE_MIN,
    crc_factor,
    crc_step,
    crc_times,
    take_crc,
    take_crc_and,
)
from anabranch.records.kernels.hashing import mixed, murmur2
from anabranch.records.kernels.memory import (
    MASK_32,
    NOWHERE,
    SLACK,
    be16,
    be32,
    be64,
    copy_32,
    copy_64,
    equal,
    i64,
    prefetch_to_read_later,
    prefetch_to_write,
    put8,
    put32,
    put64,
    put_be16,
    put_be32,
    read_varint,
    reverse_bits,
    trailing_zeros,
    u8,
    u32,
)

CHECKSUMS, FOLDS, JOINS = CHECKS_CRC, FOLDS_CRC, JOINS_CRC

# The only argument is the address of numbers of 64 bits. First the question: where the batches are; where the records
# of the first one are, 0 for in their place; the topic's first partition count and the interval of keyless records;
# the tables of checksums, 0 for none to be taken; the cells, in groups of one size; the targets; other filters, 0
# for none; and the histogram, 0 for none, with its first place and the shift that makes a bucket of a distance. The
# count is given as what divides by it: the factor and the shift of a product. GUIDE_AT is for most keys in place of
# the cells: by the low bits of a hash that is divided, which are the high bits of its place, backwards, the target of
# all places that begin so, NOBODYS, or MIXED where the cells must be asked.
AT, END, RECORDS_AT, RECORDS_END, FACTOR, KEYLESS_START, KEYLESS_MASK, TABLES_AT = 0, 1, 2, 3, 4, 5, 6, 7
CELLS_AT, CELL_GROUPS, CELLS_IN_GROUP, TARGETS_AT, TARGET_COUNT = 8, 9, 10, 11, 12
SIZES_ASKED, SIZE_MIN, SIZE_MAX, WANTED_AT, WANTED_MASK, REFUSED_AT, REFUSED_MASK = 13, 14, 15, 16, 17, 18, 19
HISTOGRAM_AT, HISTOGRAM_START, HISTOGRAM_SHIFT, HISTOGRAM_LAST = 20, 21, 22, 23
SHIFT, GUIDE_AT = 24, 25
# REFERS: whether targets are given pieces, for which there must be JOINS. Then the answer: the first batch that was not
# scattered, and the offset behind the last one that was.
REFERS, STOPPED_AT, NEXT_OFFSET = 26, 27, 28
SHEET_SIZE = 29
# A cell: the places from START to LAST, and the target of their records.
CELL_START, CELL_LAST, CELL_TARGET, CELL_SIZE = 0, 8, 16, 24
# A target: where it goes on, how far it may be written, what it holds, and what it was given of the current batch.
TARGET_AT, TARGET_END, TARGET_RECORDS, TARGET_WRITTEN_TO, TARGET_BATCH_RECORDS = 0, 8, 16, 24, 32
# Where it is given pieces, only what it holds of these, and: behind the last piece, and how far there may be some;
# memory for headers, short records and control batches; both also with what is of the current batch; where the ends of
# pieces go, and the last one, all of which are written in the end, for the pieces from PIECES_FROM on; of the records
# of the current batch the bytes, the checksum, and half of what takes another so many bytes further.
PIECES_FROM = TARGET_WRITTEN_TO
PIECES_AT, PIECES_END, PIECES_NOW, OWN_AT, OWN_END, OWN_NOW, ENDS_AT, LAST_END = 40, 48, 56, 64, 72, 80, 88, 96
BATCH_SIZE, BATCH_CRC, BATCH_HALF_FACTOR = 104, 112, 120
TARGET_SIZE = 128
# A piece, as the system's writev takes it: its address and its size. An end: the bytes of all pieces so far.
PIECE_BYTES, PIECE_SIZE, END_SIZE = 8, 16, 8
REFERRED_MIN = 512
"""Bytes of a record from which on it is sent from where it lies."""
JOINED_MIN = 256
"""Bytes of a batch's records, on average, from which on its own checksum is joined from theirs."""
# An entry of a set of keys: the hash, the address and the size of a key; the size of an empty one is -1.
ENTRY_HASH, ENTRY_AT, ENTRY_KEY_SIZE, ENTRY_SIZE = 0, 8, 16, 24
DONE, COMPRESSED, FULL, MALFORMED, DAMAGED = 0, 1, 2, -1, -2
GUIDE_BITS = 10
NOBODYS, MIXED = 0xFE, 0xFF

_LOW_31 = 0x7FFF_FFFF
_ENDS = 0x8080_8080_8080_8000 - (1 << 64)
"""The highest bits of eight bytes, but of the first one, which holds attributes."""
_GUIDE_MASK = (1 << GUIDE_BITS) - 1
_AHEAD, _AHEAD_MAX = 2048, 128 * 1024
"""Bytes that are brought near before they are read: of the next batch, where this one is near since its checksum."""
_WRITTEN_AHEAD = 512
"""Bytes that are brought near before a target is given them: no processor foretells where sixteen go on."""
_LENGTH_AT, _MAGIC_AT, _CRC_AT, _ATTRIBUTES_AT, _LAST_DELTA_AT, _COUNT_AT = 8, 16, 17, 21, 23, 57
_WITH_COUNT_AT = CRC_FROM + LATE_AT


@inlined
def _number(at: int, end: int) -> tuple[int, int]:
    """As `read_varint`, and faster for the numbers that are usual, of one or two bytes."""
    if end - at >= 2:
        first = u8(at)
        if first < 0x80:
            return (first >> 1) ^ -(first & 1), at + 1
        second = u8(at + 1)
        if second < 0x80:
            value = (first & 0x7F) | second << 7
            return (value >> 1) ^ -(value & 1), at + 2
    return read_varint(at, end)


@inlined
def _key_of(body: int, record_end: int, records_end: int) -> tuple[int, int]:
    """Where the key of a record begins, and its size, negative for none; NOWHERE in a record that is not sound.

    Of the usual record that is found in eight bytes without a branch: the last byte of a number has no highest bit.
    """
    if records_end - body >= 8:
        word = i64(body)
        ends = ~word & _ENDS
        ends &= ends - 1
        before = trailing_zeros(ends)
        ends &= ends - 1
        if trailing_zeros(ends) == before + 8:
            field = body + (before >> 3) + 2
            size = (word >> (before + 1)) & 0xFF
            size = (size >> 1) ^ -(size & 1)
            return (field if max(size, 0) <= record_end - field else NOWHERE), size
    _, field = _number(body + 1, record_end)
    if field <= record_end:
        _, field = _number(field, record_end)
    if field <= record_end:
        size, field = _number(field, record_end)
        if field <= record_end and size <= record_end - field:
            return field, size
    return NOWHERE, 0


@inlined
def _offset_delta(body: int, record_end: int) -> int:
    """The distance of a sound record's offset from the first one."""
    _, field = _number(body + 1, record_end)
    delta, _ = _number(field, record_end)
    return delta


@inlined
def _move(target: int, source: int, size: int) -> None:
    """Copy exactly `size` bytes, by moves that overlap: a call of the C library has no place in plain code."""
    if size >= 32:
        if size >= 64:
            last = size - 64
            moved = 0
            while moved < last:
                prefetch_to_write(target + moved + _WRITTEN_AHEAD)
                copy_64(target + moved, source + moved)
                moved += 64
            prefetch_to_write(target + moved + _WRITTEN_AHEAD)
            copy_64(target + last, source + last)
        else:
            copy_32(target, source)
            copy_32(target + size - 32, source + size - 32)
    elif size >= 8:
        low = i64(source)
        high = i64(source + size - 8)
        if size > 16:
            put64(target + 8, i64(source + 8))
            put64(target + size - 16, i64(source + size - 16))
        put64(target, low)
        put64(target + size - 8, high)
    elif size >= 4:
        low = u32(source)
        high = u32(source + size - 4)
        put32(target, low)
        put32(target + size - 4, high)
    elif size > 0:
        first = u8(source)
        middle = u8(source + (size >> 1))
        last_byte = u8(source + size - 1)
        put8(target, first)
        put8(target + (size >> 1), middle)
        put8(target + size - 1, last_byte)


@inlined
def _holds(entries: int, mask: int, murmur: int, key_at: int, key_size: int) -> bool:
    """Whether a set of keys, an open hash table with empty entries, holds a key; never where there is none."""
    if key_size < 0:
        return False
    place = murmur & mask
    while True:
        entry = entries + place * ENTRY_SIZE
        size = i64(entry + ENTRY_KEY_SIZE)
        if size < 0:
            return False
        if size == key_size and i64(entry + ENTRY_HASH) == murmur and equal(i64(entry + ENTRY_AT), key_at, size):
            return True
        place = (place + 1) & mask


@inlined
def _begun(cells: int, count: int, step: int, place: int) -> int:
    """How many of `count` cells, `step` bytes apart, begin at a place or before.

    Without a branch, which no processor could foretell: signs are added up.
    """
    begun = 0
    for _ in range(count):
        begun -= (i64(cells) - 1 - place) >> 63
        cells += step
    return begun


@inlined
def _target_of(cells: int, groups: int, group_size: int, place: int) -> int:
    """The target of a place in the key space, or NOBODYS. The cells ascend."""
    if groups > 1:
        cells += max(_begun(cells, groups, group_size * CELL_SIZE, place) - 1, 0) * group_size * CELL_SIZE
    if group_size > 1:
        cells += max(_begun(cells, group_size, CELL_SIZE, place) - 1, 0) * CELL_SIZE
    if i64(cells) <= place <= i64(cells + CELL_LAST):
        return i64(cells + CELL_TARGET)
    return NOBODYS


@inlined
def _write_head(made: int, batch: int) -> None:
    """Put a header before the records that a target may be given of a batch, but for its length, count and CRC."""
    _move(made, batch, HEADER_SIZE)
    put_be16(made + _ATTRIBUTES_AT, be16(batch + _ATTRIBUTES_AT) & ~COMPRESSION_MASK)


@inlined
def _begin(target: int, batch: int, needed: int) -> bool:
    """Begin a batch of a target; whether there is room for `needed` bytes."""
    made = i64(target + TARGET_AT)
    if i64(target + TARGET_END) - made < needed:
        return False
    put64(target + TARGET_WRITTEN_TO, made + HEADER_SIZE)
    _write_head(made, batch)
    put32(made + _COUNT_AT, 0)
    return True


@inlined
def _begin_pieces(target: int, needed: int, none: int) -> bool:
    """Begin a batch of a target that is given pieces; whether there is room for `needed` bytes, and for a piece.

    `none`: what takes a checksum no bytes further.
    """
    pieces = i64(target + PIECES_AT)
    own = i64(target + OWN_AT)
    if i64(target + PIECES_END) - pieces < PIECE_SIZE:
        return False
    if i64(target + OWN_END) - own < needed:
        return False
    put64(pieces, own)
    put64(pieces + PIECE_BYTES, HEADER_SIZE)
    put64(target + PIECES_NOW, pieces + PIECE_SIZE)
    put64(target + OWN_NOW, own + HEADER_SIZE)
    put64(target + BATCH_SIZE, 0)
    put64(target + BATCH_CRC, 0)
    put64(target + BATCH_HALF_FACTOR, none >> 1)
    return True


@inlined
def _refer(target: int, record: int, size: int, given: bool) -> int:
    """Add a record to the pieces of a target, a short or a `given` one in memory of its own.

    Return where it is sent from; NOWHERE if there is no room.
    """
    if size < REFERRED_MIN or given:
        own = i64(target + OWN_NOW)
        if size > i64(target + OWN_END) - SLACK - own:
            return NOWHERE
        _move(own, record, size)
        put64(target + OWN_NOW, own + size)
        record = own
    piece = i64(target + PIECES_NOW)
    last = piece - PIECE_SIZE
    last_size = i64(last + PIECE_BYTES)
    if i64(last) + last_size == record:
        put64(last + PIECE_BYTES, last_size + size)
    else:
        if i64(target + PIECES_END) - piece < PIECE_SIZE:
            return NOWHERE
        put64(piece, record)
        put64(piece + PIECE_BYTES, size)
        put64(target + PIECES_NOW, piece + PIECE_SIZE)
    return record


@inlined
def _join(target: int, size: int, crc: int, further: int) -> None:
    """Note a record that a target is given of the current batch. `further`: what takes a checksum past it."""
    put64(target + BATCH_SIZE, i64(target + BATCH_SIZE) + size)
    put64(target + BATCH_CRC, crc_times(i64(target + BATCH_CRC), further) ^ crc)
    put64(target + BATCH_HALF_FACTOR, crc_times(i64(target + BATCH_HALF_FACTOR), further))
    put64(target + TARGET_BATCH_RECORDS, i64(target + TARGET_BATCH_RECORDS) + 1)


@inlined
def _keep(target: int) -> None:
    """Keep the pieces of the current batch."""
    put64(target + PIECES_AT, i64(target + PIECES_NOW))
    put64(target + OWN_AT, i64(target + OWN_NOW))


@inlined
def _write_ends(target: int) -> None:
    """Write the ends of the pieces that are new: of all batches at once, as of one there is no foretelling how many."""
    piece = i64(target + PIECES_FROM)
    behind = i64(target + PIECES_AT)
    end_at = i64(target + ENDS_AT)
    end = i64(target + LAST_END)
    while piece < behind:
        end += i64(piece + PIECE_BYTES)
        put64(end_at, end)
        piece += PIECE_SIZE
        end_at += END_SIZE
    put64(target + ENDS_AT, end_at)
    put64(target + LAST_END, end)


@inlined
def _late(records: int) -> int:
    """The count of a header as it is read, in the word that ends with it."""
    swapped = (records & 0xFF) << 24 | (records & 0xFF00) << 8 | (records >> 8) & 0xFF00 | (records >> 24) & 0xFF
    return swapped << 32


@inlined
def _close(target: int, tables: int) -> None:
    """Complete the header of the records that a target was given of a batch.

    Nothing is read of what was just written: it would have to wait. So the checksum is told the count, if it can be.
    """
    made = i64(target + TARGET_AT)
    end = i64(target + TARGET_WRITTEN_TO)
    records = i64(target + TARGET_BATCH_RECORDS)
    put_be32(made + _LENGTH_AT, end - made - LENGTH_END)
    if tables != 0:
        if not FOLDS_CRC or end - made - CRC_FROM < LATE_SIZE_MIN:
            put_be32(made + _COUNT_AT, records)
        put_be32(made + _CRC_AT, take_crc_and(made + CRC_FROM, end, tables, _late(records)))
    put_be32(made + _COUNT_AT, records)
    put64(target + TARGET_AT, end)
    put64(target + TARGET_RECORDS, i64(target + TARGET_RECORDS) + records)


@inlined
def _head_crc(batch: int, attributes: int) -> int:
    """The checksum of a header, as of `crc_step`, up to the word that ends with the count."""
    swapped = (attributes & 0xFF) << 8 | (attributes >> 8) & 0xFF
    crc = crc_step(MASK_32, i64(batch + CRC_FROM) & ~0xFFFF | swapped)
    for place in range(batch + CRC_FROM + 8, batch + _WITH_COUNT_AT, 8):
        crc = crc_step(crc, i64(place))
    return crc


@inlined
def _close_pieces(target: int, batch: int, head_crc: int) -> None:
    """As `_close`, for a target that is given pieces. `head_crc`: as of `_head_crc`."""
    own = i64(target + OWN_AT)
    records = i64(target + TARGET_BATCH_RECORDS)
    _write_head(own, batch)
    crc = crc_step(head_crc, i64(batch + _WITH_COUNT_AT) & MASK_32 | _late(records)) ^ MASK_32
    crc = crc_times(crc, i64(target + BATCH_HALF_FACTOR) << 1) ^ i64(target + BATCH_CRC)
    put_be32(own + _LENGTH_AT, HEADER_SIZE + i64(target + BATCH_SIZE) - LENGTH_END)
    put_be32(own + _CRC_AT, crc)
    put_be32(own + _COUNT_AT, records)
    put64(target + TARGET_RECORDS, i64(target + TARGET_RECORDS) + records)
    _keep(target)


@kernel
def scatter(sheet: int) -> int:
    """Scatter whole batches from AT to END; return DONE, or why the batch at STOPPED_AT was not scattered.

    COMPRESSED: its records must be given, expanded. FULL: it does not fit into a target. MALFORMED: its records are not
    sound, and what its targets were given of it does not count. DAMAGED: it is not what its checksum was made of.
    """
    targets = i64(sheet + 8 * TARGETS_AT)
    count = i64(sheet + 8 * TARGET_COUNT) if i64(sheet + 8 * REFERS) != 0 else 0
    for number in range(count):
        target = targets + number * TARGET_SIZE
        put64(target + PIECES_FROM, i64(target + PIECES_AT))
    status = _scattered(sheet)
    for number in range(count):
        _write_ends(targets + number * TARGET_SIZE)
    return status


@inlined
def _scattered(sheet: int) -> int:
    at = i64(sheet + 8 * AT)
    end = i64(sheet + 8 * END)
    given_at = i64(sheet + 8 * RECORDS_AT)
    factor = i64(sheet + 8 * FACTOR)
    shift = i64(sheet + 8 * SHIFT)
    guide = i64(sheet + 8 * GUIDE_AT)
    keyless_start = i64(sheet + 8 * KEYLESS_START)
    keyless_mask = i64(sheet + 8 * KEYLESS_MASK)
    tables = i64(sheet + 8 * TABLES_AT)
    cells = i64(sheet + 8 * CELLS_AT)
    cell_groups = i64(sheet + 8 * CELL_GROUPS)
    cells_in_group = i64(sheet + 8 * CELLS_IN_GROUP)
    targets = i64(sheet + 8 * TARGETS_AT)
    targets_end = targets + i64(sheet + 8 * TARGET_COUNT) * TARGET_SIZE
    sizes_asked = i64(sheet + 8 * SIZES_ASKED)
    size_min = i64(sheet + 8 * SIZE_MIN)
    size_max = i64(sheet + 8 * SIZE_MAX)
    wanted = i64(sheet + 8 * WANTED_AT)
    wanted_mask = i64(sheet + 8 * WANTED_MASK)
    refused = i64(sheet + 8 * REFUSED_AT)
    refused_mask = i64(sheet + 8 * REFUSED_MASK)
    histogram = i64(sheet + 8 * HISTOGRAM_AT)
    histogram_start = i64(sheet + 8 * HISTOGRAM_START)
    histogram_shift = i64(sheet + 8 * HISTOGRAM_SHIFT)
    histogram_last = i64(sheet + 8 * HISTOGRAM_LAST)
    refers = i64(sheet + 8 * REFERS)
    none = crc_factor(0, tables) if refers != 0 else 0
    while True:
        put64(sheet + 8 * STOPPED_AT, at)
        if end - at < HEADER_SIZE:
            return DONE
        size = be32(at + _LENGTH_AT) + LENGTH_END
        if size < HEADER_SIZE:
            return MALFORMED
        if size > end - at:
            return DONE
        if u8(at + _MAGIC_AT) != MAGIC:  # No checksum covers it.
            return DAMAGED
        base_offset = be64(at)
        attributes = be16(at + _ATTRIBUTES_AT)
        count = be32(at + _COUNT_AT)
        record = at + HEADER_SIZE
        records_end = at + size
        whole = (attributes & CONTROL) != 0
        packed = (attributes & COMPRESSION_MASK) != 0 and not whole and count > 0
        given = False
        # Short records take longer one by one than all at once.
        joins = refers != 0 and (attributes & (CONTROL | COMPRESSION_MASK)) == 0 and size > count * JOINED_MIN
        is_checked = not joins and tables != 0 and targets < targets_end and given_at == 0
        if is_checked and take_crc(at + CRC_FROM, records_end, tables) != be32(at + _CRC_AT) & MASK_32:
            return DAMAGED
        if packed:
            if given_at == 0:
                return COMPRESSED
            record = given_at
            records_end = i64(sheet + 8 * RECORDS_END)
            given_at, given = 0, True
        needed = HEADER_SIZE + SLACK
        if whole or histogram != 0:  # Of a batch that is begun again, records would count twice.
            needed += records_end - record
        target = targets
        while target < targets_end:
            if refers != 0:
                if not _begin_pieces(target, needed, none):
                    return FULL
            elif not _begin(target, at, needed):
                return FULL
            put64(target + TARGET_BATCH_RECORDS, 0)
            target += TARGET_SIZE
        if whole:  # Only now: the batch is begun again for all targets if one of them has no room for it.
            target = targets
            while target < targets_end:
                if refers != 0:
                    own = i64(target + OWN_AT)
                    _move(own, at, size)
                    put64(target + OWN_NOW, own + size)
                    put64(i64(target + PIECES_AT) + PIECE_BYTES, size)
                    _keep(target)
                else:
                    made = i64(target + TARGET_AT)
                    _move(made, at, size)
                    put64(target + TARGET_AT, made + size)
                target += TARGET_SIZE
        if not whole:
            is_sound, head_crc, crc = True, 0, 0
            if refers != 0:
                head_crc = _head_crc(at, attributes & ~COMPRESSION_MASK)
                crc = crc_step(head_crc, i64(at + _WITH_COUNT_AT)) ^ MASK_32
            ahead = record
            distance = min(max(records_end - record, _AHEAD), _AHEAD_MAX) if is_checked else _AHEAD
            for _ in range(count):
                length, body = _number(record, records_end)
                if body > records_end or length < 1 or length > records_end - body:
                    is_sound = False
                    break
                record_end = body + length
                while ahead < record_end:
                    prefetch_to_read_later(ahead + distance)
                    ahead += 64
                field, key_size = _key_of(body, record_end, records_end)
                if field > record_end:
                    is_sound = False
                    break
                murmur, divided, chosen = 0, 0, MIXED
                if key_size >= 0:
                    murmur = murmur2(field, key_size)
                    divided = ((murmur & _LOW_31) * factor) >> shift
                    chosen = u8(guide + (divided & _GUIDE_MASK))
                if chosen == MIXED or histogram != 0:
                    if key_size >= 0:
                        place = reverse_bits(divided << 1) | (mixed(murmur) & MASK_32)
                    else:
                        offset = base_offset + _offset_delta(body, record_end)
                        place = (mixed(offset) & keyless_mask) + keyless_start
                    if histogram != 0:
                        bucket = histogram + 16 * min(
                            max((place - histogram_start) >> histogram_shift, 0), histogram_last
                        )
                        put64(bucket, i64(bucket) + 1)
                        put64(bucket + 8, i64(bucket + 8) + record_end - record)
                    if chosen == MIXED:
                        chosen = _target_of(cells, cell_groups, cells_in_group, place)
                if chosen < NOBODYS and wanted != 0 and not _holds(wanted, wanted_mask, murmur, field, key_size):
                    chosen = NOBODYS
                if chosen < NOBODYS and refused != 0 and _holds(refused, refused_mask, murmur, field, key_size):
                    chosen = NOBODYS
                if chosen < NOBODYS and sizes_asked != 0:
                    key_end = field + max(key_size, 0)
                    value_size, behind = _number(key_end, record_end)
                    if behind > record_end or value_size > record_end - behind:
                        is_sound = False
                        break
                    content = max(key_size, 0) + max(value_size, 0)
                    if content < size_min or content > size_max:
                        chosen = NOBODYS
                record_size = record_end - record
                target = targets + chosen * TARGET_SIZE
                if refers != 0 and (joins or chosen < NOBODYS):
                    read_at = record
                    if chosen < NOBODYS:
                        sent_from = _refer(target, record, record_size, given)
                        if sent_from == NOWHERE:
                            return FULL
                        if given:  # There may be nothing to be read before the first one.
                            read_at = sent_from
                    further = crc_factor(record_size, tables)
                    record_crc = take_crc(read_at, read_at + record_size, tables)
                    crc = crc_times(crc, further) ^ record_crc
                    if chosen < NOBODYS:
                        _join(target, record_size, record_crc, further)
                elif chosen < NOBODYS:
                    to = i64(target + TARGET_WRITTEN_TO)
                    if record_size > i64(target + TARGET_END) - SLACK - to:
                        return FULL
                    _move(to, record, record_size)
                    put64(target + TARGET_WRITTEN_TO, to + record_size)
                    put64(target + TARGET_BATCH_RECORDS, i64(target + TARGET_BATCH_RECORDS) + 1)
                record = record_end
            if joins:
                if record != records_end:
                    crc = take_crc(at + CRC_FROM, records_end, tables)
                if crc != be32(at + _CRC_AT) & MASK_32:
                    return DAMAGED
            if not is_sound:
                return MALFORMED
            target = targets
            while target < targets_end:
                if i64(target + TARGET_BATCH_RECORDS) > 0:
                    if refers != 0:
                        _close_pieces(target, at, head_crc)
                    else:
                        _close(target, tables)
                target += TARGET_SIZE
        put64(sheet + 8 * RECORDS_AT, 0)  # What was given was this batch's.
        put64(sheet + 8 * NEXT_OFFSET, base_offset + be32(at + _LAST_DELTA_AT) + 1)
        at += size
