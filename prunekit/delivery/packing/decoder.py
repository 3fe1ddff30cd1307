"""Decoder of packed models, in one file that needs NumPy alone: copy it into an app. docs/packing.md has the format.

`decode` returns the bytes of a LiteRT file, or the texts and arrays of a Keras file. License: Apache-2.0.
"""

import json
import lzma
import math
import zlib
from base64 import b85decode
from collections.abc import Callable
from operator import mul
from typing import Any

import numpy as np

LITERT, KERAS = b"pkl1", b"pkk1"
INTEGER, TABLE, GRID, FLOAT, LENGTH, PRODUCT, RAW, TEXT = range(8)
DTYPES = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "|b1", "int4")
LZMA = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 24}]
# Longer texts, and more small numbers, are coded by LZMA: of mixed contexts, a byte takes some 0.05 ms.
MIXED_TEXT, MIXED_SMALL = 1 << 14, 1 << 15
TOTAL_BITS, MOST_CONTEXTS = 14, 1 << 12
# A file may become this many bytes, or this many times as large.
LARGEST, MOST_EXPANSION = 1 << 26, 1000
# Texts of usual files, which the model of texts learns first (scripts/packing-primes).
PRIMES = {
    KERAS: (
        ")mLqA+cpsXD}g>ct|hr?oKI^PY#1<X`>=hfVGw7Tw%JgmKvHg9!~cDE6qV@Bo`YsV3&%io_uMOwkIwUXlye6wa4`O4wTecnlyWheN10Y@vFQ"
        "lGIU|;(<F=!au;<3US%S;9OlgyY6kov!t={Ya6_aQ*kCVkE(D-s_ayc~ZL9xJHvU*A{9noh9!{SB}Bm5+1Vf_MDTv`6)<K4~eD4Co9koADFn"
        "L{!e-JArFeMeik?Pr0Ap^B-N|3=p(Ee_EGH(=QgvDn+_?kY;h@!K&1t|FWw&MfTsisZ>8xw($x>tyy*oZcnL-87AkhbY&pQgQ-#Ph)GcG0M2"
        "K<8`SrIx&#sEt6m^Q;>V`FKwM4PLv;_8qhX&284p859CbAQB)O(&+~o~LD!4=n<`58J1IL+t2wh<C<r&FYcRS>lki<oGu*zY5|bKSnverqU^"
        "7X$25BiL1DlQSRxPLliyStbOmq>73Ya5V@r|&K8@{R&t>X8sg<9%TAq*SrOJAV<<>miOBXEDB;njScXm(wFFIGRu{oe@vOG}aMPaSRO;OW{)"
        "vlh}-2aGfAqbV+#6<_@crQujC5?JU3q7o7nuv!U4AtOsJt4Rj7CKhqN)Ga7<W*H{#yk1DpEzID^ldpJm6_c-x(PiOtzz4vA+<6>1kwS6sb5!"
        "E(S_-g@a}U`HC7dAU!hsuT-ngM3=;W_b8}0s4f->*)(sDm%VNe9kHG?m{5kaO)*AbrYH&yVB34i29+jgSoV}>>%pp;-j)R4c=XHetMLAd>}H"
        "u%I8tRH08aoJOxy@Jb9$Q5fezH0SJrZ_gP?bD6w-P=P1W)uEv_mHuQksZDSv|+4!?$4yC%Gnl+(`HY0k7P2zzs2!Lh7X@ZHV1ru7NdM1-u$E"
        "adOmUI2VUgg2h|XVY=MM&`H5$a3A$HtI=g*4eK(!P>2#Ldk~w@4)S_!*f?VfZxiZJ+$#^zH2`{XWo){+M$%HT&BK%y2x@-o`GMBifz4mq6K%"
        "ReV&_5M_R?J-Qkc?T*LA`dlAvA700#wFdxp05LgA7$2!!YTQ(GYc2HbWY_SJ~ERg^rq=hv9VDdIFY7Q54ndF*pc{&P=}mE5<kBo3v>01Qq;m"
        "9N9?YVv>BM?m?D}a<C8eQ9qM0-#;x8!;}Rrz>h?bt@X%oSw<Iax9x(zt1%cJ)fahl-q%0O&MxKMpKm|dNci+wUP>nlDLm1|7wz)({{51>{J?"
        "y+m-o7vk3D~x_5EJ"
    ),
    LITERT: (
        "byrVl990;9v%8tyNv7LPJ2puhHA=uBCEe5>LK1C7DHRe4(L)cyX6$adtJ~dWGaGXVvS5%<a_Avo!5&)i;Gsw<9(uAxbLgRXP!A$SJd{$TNT~"
        "s%-DdoK?|n1#c3T&InfK@W|9$U!FXE-7Fg9YQVLBMtrr|VAHLz{^iZ0s_hGD2Rqx|HWeV}9QMoJ{jV3LSirtyanlapzYbb^gk+;WV&ym2CK*"
        "&)@*F3Ye7p8x5y2~1{b=dKZ#JM*;j?DrpEn#5#;cJ47xQ6xkCDWZCz&}<S_vu98U@$T{IR~#`U21UPcL`K+HONj)=LeTyi<K{6TegWp+79x("
        "h0VIGQzV&^ZX|XMK1B-?FQmJw}moF^1jj|_cm0VlOPGRgYzX?<uUajFpGUp(ZzFk1+jC;Bu)bAN!3QCRu2Z3Q=5O4q+NC2&)LTmx|fjhu0U>"
        "z8LO^EGRg;)WmfD2PtXMNwXzGdL}bu|{)pL?Xn=YT(XoCRKPsc{+jq7|+G#^X2P$mmYA{sE84Zy!GjVDX{vmw_7K0n5M&&;(Y2HDDb$2W$Wo"
        "*O}?J=7!#=R+b8NuaF;=@p5Ej(qZ-}zG+^koZN{CaSym3Q@);YOBLei0lvZ7Jg^Nx=Yf*|YDL`QoX-NoKt}554&`@awhq1#u7ih<eP7ujEcz"
        "Z{U*9KRMf0d3xrNxj6VjzJY-1Ae{_=gIv4pBE;@!)!x(c2_=ArKp^HAmBG|BoQGYsa7^Zp*@e;D!i2K;8opOE8mOZh>3G2W;6jDmky@ph3<^"
        "IVfE-hFNHj&&fgiDd2ZLmPSm8&o}{q}CMIx54rQ8ANjxyhFTA@je*Jr+n-V^I<Roy$Oy5p*PH7TI}aK>0!IszgU*@7H2v~^4K!QX-%$<Kz@w"
        "ReY&F-108|=Yo^i{ll>qg|B`&0_XEF!{<4ev2KgHFrEbo%(_xDf`7irK3WTf3>lTPF0#m>}BzOfF0XAXFG|)o8Zva0dVB^4TD9-|$Fk~Fqf~"
        "=E3ztoXodxDIqJ~?cvl|1{m(5Rg9O4W*6&W#<)7b=T|+!#jhR2RH6?s9ISTy;I-{`!$R59RP23yXS?^SAGlym77{lk*pensL3EMp<a}O8m!L"
        "N?yOA&JW2O!uT@FyBz6}-*hB1lo$(W5Q9(oT+i}(B6)NM?r)<naX+DW>;q1rEgjBF<7ikdHz)!TO^_!Vr@0SYi>cZqH*R3;{R2BSxk0_|)y^"
        "56fnr$C!fMLT9-iBrnS`{L>S)b~<PA!HYhLlA5_}FUJ`^qqJ~w)86W?>bviB=P)j8RF1>@C!eScd-@|XN5UTG~}w?TJNqjR))wMQ$WiE9YX)"
        "ZUK%evQwFj34#UM=H<dFn;PwHoNtbR~&`1MbE8xV_`0AS=FkK*c?~pjnTR7qk1m8o>!>A*tx=D(XAD7@~@OZ^>VdEeO?%OwriOCC;5LKe=cB"
        "uIUdCpcfw?ETRrp9z}gPW>gT?3jPDMTHO=~{uT#x$wUocX+2=kJ_R{Y!<vaAKDj#DxL4U44Zr7RRyNEvHnoiPF1nuQm<jd@?l}TGWM{|X8Lu"
        "m4e=SNNcEv`fEAl8T`pOW4Cw0LXsh~~weNZty^JE_^5V0kIlL-q~GyMH-Xt5(Z+o5|9fahGQ?J)GC-UgtR*=rNQZ+3@ZZ7QJ!29i=0~yr28("
        "N8?Yru1r!4-8^Y}Jx@A*WqCI_E=R)qR9Mt!H+S0eX?5iD`g<29`u?}qjEM<f$uDYkm|*!EG{^n}%~yIz_dUHQ$TXhyqd1RnKaL0fYjMtK=Vl"
        "G_bxj97$tkBUZiFS5?2L*epvknIyM6LCexU8PNy;8e<QrV0Q_(xax+Zx8+63Q~QC^x_Ug+^pvg*}FB~Op^Y_7VHtJNEo!iObK=^uRJwu|&T9"
        "E;%XH>Jg4h;56@wS-*nd-DH*oP5(yWJCXTKFawf@FlPc)F?l|34Z(Zvp$ORKoo<4^O##&zSl8loA=r1n7g#t^agyr-Qj)F&1=8=>aEUsPCUR"
        "o>cb*#%WfITG9w#ITfTXeJld<P_4<D"
    ),
}


class Damaged(ValueError):
    """Raised for data that are not a whole packed model, or declare more bytes than they may hold."""


class TextModel:
    """Codes numbers bit by bit, by the predictions of contexts, mixed in the logistic domain.

    Source: Mahoney 2005, "Adaptive weighing of context models for lossless data compression".
    """

    SQUASH = [min(max(round(4096 / (1 + math.exp(-x / 256))), 1), 4095) for x in range(-2047, 2048)]
    STRETCH = [int(x) - 2047 for x in np.searchsorted(SQUASH, np.arange(4096)).clip(0, 4094)]

    def __init__(self, prime: str, coded: Callable[[int, int], int]) -> None:
        # {context: {upper bits of the number, after a 1: probability of a 1 in 1/65536, and low 8 bits: 3 + 2 * seen}}
        self.cells, self.text, self.left = dict[int, dict[int, int]](), bytearray(), MIXED_SMALL
        self.weights = {mixer: [16000] * (4 if mixer else 9) for mixer in range(-8, 1)}
        self.coded: Callable[[int, int], int] = lambda _, bit: bit
        for byte in zlib.decompress(b85decode(prime), -15) if prime else b"":
            self.byte(byte)
        self.coded = coded

    def code(self, contexts: list[int], first: int, bits: int, mixer: int, number: int) -> int:
        """Codes a number of `bits` bits, the upper ones first, by its contexts and those for `mixer`."""
        slots = [self.cells.setdefault((x << 4 | bits) << 4 | i, {}) for i, x in enumerate(contexts, first)]
        weights, stretch, node = self.weights[mixer], self.STRETCH, 1
        for shift in range(bits - 1, -1, -1):
            states = [slot.get(node, 32768 << 8 | 3) for slot in slots]
            inputs = [stretch[state >> 12] for state in states]
            probability = self.SQUASH[min(max(sum(map(mul, inputs, weights)) >> 16, -2047), 2047) + 2047]
            bit = self.coded(probability, number >> shift & 1)
            error, target = ((bit << 12) - probability) * 20, 65535 * bit
            weights[:] = [weight + (x * error + 32768 >> 16) for weight, x in zip(weights, inputs, strict=True)]
            for slot, state in zip(slots, states, strict=True):
                seen = state & 255
                slot[node] = state + (2 * (target - (state >> 8)) // seen << 8) + 2 * (seen < 43)
            node = node << 1 | bit
        return node - (1 << bits)

    def byte(self, byte: int = 0) -> int:
        """Codes a byte of the text, by the last ones and those at distances usual in flatbuffers."""
        h, place = int.from_bytes(self.text[-9:], "big"), len(self.text) & 3
        contexts = [h & (1 << bits) - 1 for bits in (0, 8, 16, 24, 40, 72)]
        contexts += [x << 2 | place for x in (h & 255, h >> 24 & 255, (h >> 16 & 0xFF00) | h >> 56 & 255)]
        self.text.append(self.code(contexts, 0, 8, 0, byte))
        return self.text[-1]

    def small(self, count: int, bits: int, stride: int, given: list[int] | None = None) -> np.ndarray:
        """Codes a list of small numbers, each by those one and two and `stride` and `stride` - 1 before."""
        self.left -= count
        if self.left < 0 or not 0 < stride <= MIXED_SMALL or bits > 8:
            raise Damaged("it declares more bytes than it may hold")
        found = [0] * (stride + 1)
        for i in range(count):
            p, q, a, b = found[-1], found[-2], found[-stride], found[1 - stride]
            contexts = [(p + q) >> 1, (p + q + a + b) >> 2, a << 8 | p, a]
            found.append(self.code(contexts, 9, bits, -bits, given[i] if given else 0))
        return np.array(found[stride + 1 :], np.uint8)


def open_text(data: bytes, length: int, prime: str, mixed: bool) -> tuple["Reader", Callable[..., np.ndarray]]:
    """Returns a reader of the text of `length` bytes, and a function of count, bits and stride: small numbers."""
    if not mixed:
        text = Reader(lzma.LZMADecompressor(lzma.FORMAT_RAW, None, LZMA).decompress(data, length))
        return text, lambda count, bits, stride: text.array("|u1", count)
    code, span, rest = int.from_bytes(data[:4].ljust(4, b"\0"), "big"), 1 << 32, iter(data[4:])

    def coded(probability: int, _: int) -> int:
        nonlocal code, span
        part = (span >> 12) * probability
        bit = int(code < part)
        code, span = (code, part) if bit else (code - part, span - part)
        while span < 1 << 24:
            code, span = code << 8 | next(rest, 0), span << 8
        return bit

    model = TextModel(prime, coded)
    return Reader(bytes(model.byte() for _ in range(length))), model.small


def frequencies(levels: np.ndarray) -> np.ndarray:
    """Returns how many of 2**14 parts each symbol has, from levels of its count, shape (contexts, symbols)."""
    steps = levels.astype(np.int64) - 1
    counts = np.where(levels > 0, (4 + steps % 4) << np.clip(steps // 4, 0, 30), 0)
    parts = np.maximum((counts << TOTAL_BITS) // np.maximum(counts.sum(1, keepdims=True), 1), counts > 0)
    parts[np.arange(len(parts)), parts.argmax(1)] += (1 << TOTAL_BITS) - parts.sum(1)
    return parts


def decode_symbols(words: np.ndarray, lengths: np.ndarray, contexts: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Returns the symbols in the lanes of a range coder (Martin 1979); each lane holds a run of them.

    Args:
        words: The lanes, one after another, uint16.
        lengths: Number of words of each lane.
        contexts: Row of `parts` of each symbol.
        parts: What `frequencies` returns.
    """
    lanes, width, steps = len(lengths), parts.shape[1], -(-len(contexts) // len(lengths))
    rows = np.ascontiguousarray(np.pad(contexts, (0, steps * lanes - len(contexts))).reshape(lanes, steps).T)
    found = np.empty((steps, lanes), np.uint8)
    lookup = np.repeat(np.tile(np.arange(width, dtype=np.uint8), len(parts)), parts.reshape(-1))
    starts, parts = (np.cumsum(parts, 1) - parts).astype(np.uint64).reshape(-1), parts.astype(np.uint64).reshape(-1)
    words = np.pad(words, (0, 4)).astype(np.uint64)
    place, end = np.cumsum(lengths) - lengths, len(words) - 1
    code = words[place] << 32 | words[place + 1] << 16 | words[place + 2]
    place, span = place + 3, np.full(lanes, 1 << 48, np.uint64)
    for step in range(steps):
        row = rows[step].astype(np.int64)
        unit = span >> TOTAL_BITS
        slot = np.minimum(code // unit, (1 << TOTAL_BITS) - 1).astype(np.int64)
        symbol = lookup[row << TOTAL_BITS | slot]
        found[step], entry = symbol, row * width + symbol
        code -= unit * starts[entry]
        span = unit * parts[entry]
        short = np.flatnonzero(span < 1 << 32)
        code[short] = code[short] << 16 | words[np.minimum(place[short], end)]
        span[short] <<= 16
        place[short] += 1
    return found.T.reshape(-1)[: len(contexts)]


class Reader:
    """Takes numbers and arrays from bytes, one after another."""

    def __init__(self, data: bytes):
        self.data, self.place = data, 0

    def take(self, length: int) -> bytes:
        if length > len(self.data) - self.place:
            raise Damaged("it is not complete")
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self) -> int:
        byte = self.take(1)[0]
        return byte if byte < 128 else byte & 127 | self.number() << 7

    def array(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype)


class Tensor:
    """One tensor of two dimensions, as a packed file describes it."""

    def __init__(self, text: Reader, small: Callable[..., np.ndarray], allowed: int, first: int):
        self.form, self.dtype = text.number(), DTYPES[text.number()]
        self.shape = rows, columns = text.number(), text.number()
        self.count = rows * columns
        self.bytes = self.count * (1 if self.dtype == "int4" else np.dtype(self.dtype).itemsize)
        if self.form > TEXT or max(rows, columns, self.bytes) > allowed:
            raise Damaged("it declares more bytes than it may hold")
        self.source, self.factor = text.number() if self.form == PRODUCT else 0, text.array("<f4", self.form == PRODUCT)
        minimum, width, *classes = [text.number() for _ in range(4)] if self.form < PRODUCT else (0, 1, 0, 0)
        self.minimum = minimum >> 1 ^ -(minimum & 1)
        sizes = zip(self.shape, [(max(number, 1) - 1).bit_length() for number in classes], strict=True)
        of_rows, of_columns = (small(n, bits, text.number()) if bits else np.zeros(n, np.uint8) for n, bits in sizes)
        self.levels = small(classes[0] * classes[1] * width, 7, width).reshape(-1, width)
        self.contexts = np.zeros(0, np.uint16)
        if len(self.levels):
            self.contexts = (first + of_rows[:, None].astype(np.uint16) * classes[1] + of_columns).reshape(-1)

    def values(self, symbols: np.ndarray, text: Reader, small: Callable[..., np.ndarray], extra: Reader) -> Any:
        """Returns the entries of the tensor, from its symbols, the text and the bytes that are not coded."""
        if self.form in (TEXT, RAW):
            return text.take(self.count) if self.form == TEXT else extra.array(self.dtype, self.count)
        dtype = np.dtype("|i1" if self.dtype == "int4" else self.dtype)
        if self.form == FLOAT:
            return self.floats(dtype, symbols, self.minimum, extra)
        if self.form == LENGTH:
            return self.numbers(symbols.astype(np.int64), extra).astype(dtype)
        if self.form in (TABLE, GRID):
            axis, places = extra.number(), symbols.reshape(self.shape).astype(np.int64) + self.minimum
            lines, across = (1, *self.shape)[axis], (1, -1) if axis == 2 else (-1, 1)
            if self.form == GRID:
                return places.astype("<f4") * self.floats(dtype, small(lines, 8, 1), -1, extra).reshape(across)
            # Of each line: how many values are below zero and above, then those values in order.
            below, above = (small(lines, 8, 1).astype(np.int64) for _ in range(2))
            zeros, heads = np.cumsum(below + above) - above, small(int((below + above).sum()), 8, 1)
            table = np.insert(self.floats(dtype, heads, -1, extra), zeros, 0)
            return table[(zeros + np.arange(lines)).reshape(across) + places]
        values = symbols.astype(dtype) + np.array(self.minimum).astype(dtype)
        return values if self.dtype != "int4" else (values[::2] & 15) | np.pad(values[1::2], (0, self.count % 2)) << 4

    def floats(self, dtype: np.dtype, symbols: np.ndarray, minimum: int, extra: Reader) -> np.ndarray:
        """Returns floats; of their bits, rotated to the left by one, a symbol has the upper 8 (0: all are zero)."""
        size, some = dtype.itemsize, symbols > 0
        parts = np.zeros((len(symbols), size), np.uint8)
        parts[some, :-1] = extra.array("|u1", int(some.sum()) * (size - 1)).reshape(-1, size - 1)
        parts[some, -1] = symbols[some].astype(np.int64) + minimum
        rotated = parts.view(f"<u{size}")[:, 0]
        return (rotated >> 1 | rotated << (8 * size - 1)).view(dtype)

    def numbers(self, lengths: np.ndarray, extra: Reader) -> np.ndarray:
        """Returns integers, whose places in 0, -1, 1, -2 ... have so many bits; all but the first are not coded."""
        more = np.maximum(lengths - 1, 0)
        firsts, places = np.cumsum(more) - more, (lengths > 0).astype(np.uint64)
        bits = np.unpackbits(extra.array("|u1", -(-int(more.sum()) // 8))).astype(np.uint64)
        for bit in range(more.max(initial=0)):
            places[more > bit] = places[more > bit] << 1 | bits[firsts[more > bit] + bit]
        return (places >> 1).astype(np.int64) ^ -(places & 1).astype(np.int64)


def decode(data: bytes, largest: int = 1 << 30) -> bytes | dict[str, Any]:
    """Returns the bytes of the LiteRT file that was packed, or the texts and arrays {name: array} of the Keras file.

    Args:
        data: The packed file.
        largest: Most bytes that it may become; the memory is some five times as large.

    Raises:
        Damaged: The data are not a whole packed model, or would become larger.
    """
    if data[:4] not in PRIMES:
        raise Damaged("it does not begin with the mark of a packed model")
    try:
        return _decode(data[:4], Reader(data[4:]), min(largest, max(LARGEST, MOST_EXPANSION * len(data))))
    except Damaged:
        raise
    except Exception as error:  # damaged data make NumPy raise exceptions of every kind
        raise Damaged("it is damaged") from error


def _decode(kind: bytes, extra: Reader, allowed: int) -> bytes | dict[str, Any]:
    checksum, mixed, length, coded, words = int(extra.array("<u4", 1)[0]), *(extra.number() for _ in range(4))
    if length > (MIXED_TEXT if mixed else allowed):
        raise Damaged("it declares more bytes than it may hold")
    text, small = open_text(extra.take(coded), length, PRIMES[kind], mixed > 0)
    lengths = np.array([text.number() for _ in range(text.number())], np.int64)
    tensors, first = [], 0
    for _ in range(text.number()):
        tensors.append(Tensor(text, small, allowed, first))
        first, allowed = first + len(tensors[-1].levels), allowed - tensors[-1].bytes
    width = max(tensor.levels.shape[1] for tensor in tensors)
    if first > MOST_CONTEXTS or width > 256 or not 0 < len(lengths) <= words + 1 or lengths.sum() > words:
        raise Damaged("its tables are damaged")
    levels = np.concatenate([np.pad(t.levels, ((0, 0), (0, width - t.levels.shape[1]))) for t in tensors])
    contexts = np.concatenate([tensor.contexts for tensor in tensors])
    symbols = decode_symbols(extra.array("<u2", words), lengths, contexts, frequencies(levels))
    parts = np.split(symbols, np.cumsum([len(tensor.contexts) for tensor in tensors])[:-1])
    found = [tensor.values(part, text, small, extra) for tensor, part in zip(tensors, parts, strict=True)]
    found = [found[t.source] * t.factor if t.form == PRODUCT else one for t, one in zip(tensors, found, strict=True)]
    whole = b"".join(one if isinstance(one, bytes) else one.tobytes() for one in found)
    if zlib.crc32(whole) != checksum:
        raise Damaged("it is damaged: its checksum is another one")
    if kind == LITERT:
        return whole
    pairs = zip(json.loads(found[0]), found[1:], strict=True)
    return {name: value if shape is None else value.reshape(shape) for (name, shape), value in pairs}
