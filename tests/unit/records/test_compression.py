from __future__ import annotations

import contextlib
import gzip
import random
import tracemalloc
import zlib

import cramjam
import lz4.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import codec as peer

from anabranch.base.errors import DecodeError
from anabranch.records.compression import (
    Compression,
    ExpandsTooFarError,
    OutputTooSmallError,
    compress,
    decompress,
    decompress_into,
    gunzip,
)

CODECS = [codec for codec in Compression if codec is not Compression.NONE]
PEERS = {
    Compression.GZIP: (peer.gzip_encode, peer.gzip_decode),
    Compression.SNAPPY: (peer.snappy_encode, peer.snappy_decode),
    Compression.LZ4: (peer.lz4_encode, peer.lz4_decode),
    Compression.ZSTD: (peer.zstd_encode, peer.zstd_decode),
}
SAMPLES = [
    b"",
    b"x",
    b"flight " * 40_000,
    random.Random(1).randbytes(200_000),
    b"".join(b"N%05d delayed %d;" % (n * 7919 % 99_991, n % 45) for n in range(20_000)),
]


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("sample", SAMPLES, ids=len)
def test_what_is_compressed_comes_back(codec: Compression, sample: bytes) -> None:
    assert decompress(codec, compress(codec, sample), len(sample)) == sample


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sample", SAMPLES[1:], ids=len)
def test_a_peer_reads_ours_and_we_read_his(codec: Compression, sample: bytes) -> None:
    encode, decode = PEERS[codec]
    assert decode(bytes(compress(codec, sample))) == sample
    assert decompress(codec, encode(sample), len(sample)) == sample


def test_snappy_without_framing_is_read() -> None:
    raw = bytes(cramjam.snappy.compress_raw(SAMPLES[2]))
    assert decompress(Compression.SNAPPY, raw, len(SAMPLES[2])) == SAMPLES[2]


def test_lz4_blocks_are_independent_as_java_wants_them() -> None:
    frame = bytes(compress(Compression.LZ4, SAMPLES[4]))
    info = lz4.frame.get_frame_info(frame)
    assert not info["block_linked"]
    assert not info["content_checksum"]
    assert lz4.frame.decompress(frame) == SAMPLES[4]


def test_lz4_frames_of_other_shapes_are_read() -> None:
    for linked in (True, False):
        for size in (lz4.frame.BLOCKSIZE_MAX64KB, lz4.frame.BLOCKSIZE_MAX4MB):
            frame = lz4.frame.compress(SAMPLES[4], block_linked=linked, block_size=size, content_checksum=True)
            assert decompress(Compression.LZ4, frame, len(SAMPLES[4])) == SAMPLES[4]


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.ZSTD])
def test_a_level_is_taken(codec: Compression) -> None:
    assert len(compress(codec, SAMPLES[4], 9)) < len(compress(codec, SAMPLES[4], 1))


@pytest.mark.parametrize("codec", list(Compression))
def test_one_byte_more_than_allowed_is_refused(codec: Compression) -> None:
    with pytest.raises(DecodeError):
        decompress(codec, compress(codec, SAMPLES[4]), len(SAMPLES[4]) - 1)


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_in_bounded_memory(codec: Compression) -> None:
    bomb = compress(codec, bytes(1 << 26))
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decompress(codec, bomb, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("said", [0, 1, 0x7FFF_FFFF, 0xFFFF_FFFF])
def test_what_a_gzip_trailer_says_of_its_size_is_not_believed(said: int) -> None:
    packer = zlib.compressobj(wbits=31)
    honest = packer.compress(SAMPLES[4]) + packer.flush()
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decompress(Compression.GZIP, honest[:-4] + said.to_bytes(4, "little"), 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(honest)
    finally:
        tracemalloc.stop()


def test_gzip_is_taken_as_every_client_reads_it() -> None:
    sample = SAMPLES[4]
    plain = gzip.compress(sample)
    named = plain[:3] + b"\x08" + plain[4:10] + b"name\0" + plain[10:]
    for content in (plain, named):
        assert gunzip(content, len(sample)) == decompress(Compression.GZIP, content, len(sample)) == sample
        with pytest.raises(ExpandsTooFarError):
            gunzip(content, len(sample) - 1)
    endless = plain[:3] + b"\x08" + plain[4:10] + b"n" * 70_000 + b"\0" + plain[10:]
    for content in (endless, plain + plain, plain + b"\0", plain[:-1], plain[:5], plain[:3], b""):
        with pytest.raises(DecodeError):
            gunzip(content, len(sample))


def test_what_a_zstd_frame_says_of_its_size_is_not_believed() -> None:
    small = bytes(cramjam.zstd.compress(b"x" * 1000))
    for said in (0, 10, 1 << 30, (1 << 64) - 1):
        lying = small[:4] + bytes([small[4] & 0x1F | 0xE0]) + said.to_bytes(8, "little") + small[-10:]
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError):
                decompress(Compression.ZSTD, lying, 1 << 30)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_snappy_block_that_claims_four_gigabytes_is_refused_unallocated() -> None:
    for data in (
        b"\xff\xff\xff\xff\x0f\x00",
        compress(Compression.SNAPPY, b"")[:16] + b"\x00\x00\x00\x06\xff\xff\xff\xff\x0f\x00",
    ):
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError):
                decompress(Compression.SNAPPY, data, 1 << 30)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("codec", CODECS)
def test_content_cut_off_anywhere_is_refused_or_short(codec: Compression) -> None:
    whole = bytes(compress(codec, SAMPLES[4][:3000]))
    for end in range(len(whole)):
        with contextlib.suppress(DecodeError):
            assert len(decompress(codec, whole[:end], 10_000)) < 3000


@given(codec=st.sampled_from(CODECS), noise=st.binary(max_size=200), keep=st.integers(0, 40))
def test_any_bytes_are_content_or_a_decode_error(codec: Compression, noise: bytes, keep: int) -> None:
    data = bytes(compress(codec, b"some records " * 20))[:keep] + noise
    with contextlib.suppress(DecodeError):
        assert len(decompress(codec, data, 5_000)) <= 5_000


@pytest.mark.parametrize("codec", list(Compression))
def test_an_output_of_the_right_size_is_filled_and_a_smaller_one_refused(codec: Compression) -> None:
    packed = compress(codec, SAMPLES[2])
    output = bytearray(len(SAMPLES[2]))
    assert decompress_into(codec, packed, output) == len(output)
    assert output == SAMPLES[2]
    with pytest.raises(OutputTooSmallError):
        decompress_into(codec, packed, bytearray(len(SAMPLES[2]) - 1))
