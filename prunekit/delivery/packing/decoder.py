"""Decoder of packed models, in one file that needs NumPy alone: copy it into an app. docs/packing.md has the format.

`decode` returns the bytes of a LiteRT file, or the texts and arrays of a Keras file. License: Apache-2.0.
"""

import json
import lzma
import math
import zlib
from base64 import b85decode
from collections.abc import Callable
from typing import Any

import numpy as np

LITERT, KERAS = b"pkl1", b"pkk1"
INTEGER, TABLE, GRID, FLOAT, LENGTH, PRODUCT, RAW, TEXT = range(8)
DTYPES = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "|b1", "int4")
LZMA = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 24}]
# Longer texts are coded by LZMA: of mixed contexts, a byte takes some 0.1 ms.
MIXED_TEXT = 1 << 14
TOTAL_BITS = 14
MOST_CONTEXTS = 1 << 12
# A file may become this many bytes, or this many times as large.
LARGEST = 1 << 26
MOST_EXPANSION = 1000
# Texts of usual files, which the model of texts learns first (scripts/packing-primes).
PRIMES = {
    KERAS: (
        ")mPhY<2Dfel|avqR+1ZUlBZsR76pp75A910gBVM+%?(8gB;{SN;eYQ8MJ2K%yAC!DcHtO^X3ktWJQ~mEQOO+?;2{2BwTdRHmU1zfN4ZujvF-"
        "`MIU|;}<F==eu;a$QTY}3sOlebs6raHft=??`6-hLir`h5XXnHv`yBs<lK(WAWRy?OSozQ0t!_rO>6Z~XnVZ#Cnt}K7{@qTtY$&wQQvK~=(b"
        "I6j(>?DBfd)mrvJ_<yPRZO+~H@Yopv5y|P0n4_C#ok8uSJ5<1Z(;;oML0#AS=jP|<XMu<uG927yZb)5y}x;XpC!>@AC<bOB`1LQ6kC(WDC5$"
        "`t6JrBVj#&|F2P!+p!DFMk9B@HQNE8_z_GD2AQUWpAZKchqNYH6o)41<x<S-mRaLv+NZE_p%$eOlMYuU#gUQu23*QAb!|kdjF{!~#Gjd=nY$"
        "gd;AT8x&V7>O;Y6WdzQNo&&iLOFX0dpWLz82PT!;3c2CjQV`sHLtI!mz=<^aa{qUj9!s0uLt|-pt2|X1CQ3Vhw{l{DsgzwG{d8)X|0xp01rV"
        "D<NHTz&O)Bn&OgK@!6lyG#raX0t>xBR7Ro-ib5y~8Ci1KOfs+)v551fZa|?k%P?{0^+I}XVFpK@e5I4Clzgp?t}CAdJ^&8n*5k;D6pDkNqZ)"
        "75Qh@E8d&pKO;RG=k4%|rd;*Nf#lfOu9wEJ5L%DmT0%l({%K@l|93_kfr1evZ~Pk6rHRKXV}{0}$U9w&M}W@r-vY6&Jp4f*?gMm7E%gxig4g"
        "HKGs`ayO*mjlJwE4ZwMELf-UO{-5b#i4U;pKsLQ-tHqX>+s)k4;gD1+2Kn-8^-$Q{z8gsoNcf;ZFXe$L?#LTEe;1VeEb-)+2iwz80AOe&ELD"
        "P=M#5+<VF5<Pz`a&21uxvA9(JVpnH{mmn6wF%d(r<&E4#l%;A%u7F`n)l)B`~)g?YB@!cItcx8q3#E`^ELYN#8el9~@HivGROI*|5`ns*5EW"
        "b49ABw*yW~sMG#;oL^-n!fn8aEyRD(7!pxIf@ghH8#sob<?OjJg_|F^%1+d}FjiN8QcCaJp;*0n4SRs^;|=90WygreA>-(^>dtN3?i?3jQ~a"
        "?4)rqNj_2cC`(2q*vIy$U&xq0JTDRBlm$nCZ;2p})+57Z9bL5D9vA#ojluY+zRH{Pq5WZYb}8@weEY^m!l%#5S~^il;fXH2XqRvI@7LVrN9O"
        "Z*d2gHf)brO_-~R;"
    ),
    LITERT: (
        "byrVl990;9v%A^dNv7LPIyOlgHA=uBCEe5>LK1C7DHW0uqK6)Y&Dh;^SGT*%W;W&!WWgYz<j_OFf<3h2!9$T!JoIFX&7p_jK|P2R@lZ;UA|("
        "clcAN3{z4y(`+ihL=W!|6f|M$J`y@*#5!dQ>Qjkt}06*ufgTn#LXzM{i2gkcza)uK^)#-eqweeqUOB;s<`g;^|W#*IIWh+zntPKksq_j)i%M"
        "orteFZXDAGHO~(N^(wjn1<E=;!mHCV=_Z~_l+p_q>?$>eE#+)S0*qSrp*TdV?iWBYm!9xQohk3!baDC5aPWPQ?J=#Pz;DZVT-h|u$B}tjD?{"
        "6RmPp;Li_^Eof0C7xdFt0AHMTEi)pbf_5us}+G4SMHk-@OJN1$)X_Z_{%1&ZzGk+YY)ZJ>`4Q0+kCVe}A;yLGRUZ~%5z$BC$1r7m2zyM$a77"
        "zoP$As7h9s>7(O<)Zedqaqw*M(RHCV@+nSZ96Tv%V$Z#7#98*q?o@#utD;d7J@WZK`nz__7(U|Hk9D;mF8txc(uJ$!`xo3SeQ&^GZM!aDgRY"
        "8E612z$&l?TmaSqitF^$JF|mtRmzL`nw!s!$avW@GN~YY6yFrDQ%>$hgm?fvj3{5vImI$@bOGODZ4TIhpo_q10L3CUIp;IL5RjHSIs^Hgn5}"
        "_tnCoEciRURhgh}6{?CS^Qt7sfEB)1R;b_2R(nr%z~?q8lqG^S9sMZEhsR@cEZz&!LFWFD#<oGn>DWQM_fQQq%i{;iO|+vkr5{4qHmGnF627"
        "vX)1&j|R36mJLlG{-fm;@#U4??@Ybn@CoV7ue9{+o0+pDYYiKz73Y|%OINT;2q>`iua*FKILO?kPn05>y2?N2;D&rQ{n*ENf+DA{zWpJw<y!"
        "ulE;!UPHA#=`0^us?o(~G=<D$9UyUn$5!nyY@-NA^c;ENi?=O3}Z;-EkU+UyM+ikYkq5rZ^Btf`>yl#W|GB61|K!TTnVPFHcOaV;<{1)&t0y"
        "YNRh4Kur0Yk=sZOA$e^hq6Qw#Uzy>XSopwUT51=IiA%Zn08!O4-rFxqNvcpB=^M-O9Xs&RNRNmnx1++}}J_=b;pwV_{Mcvj6rxk~hZn6X*Pe"
        "qNW{px?U1my%PV4rjplZsPjYe1~I<M@~(z@<Tn+{3?xQ;8pPl;KG!pRo=6^@frmTjOWaQ=9{YhaXiG<O(l{DcN_C1rNaN>;#wqRtHzKMw$&F"
        "hWyZ^vWO|D<B`?PaLXP^+&voIU-)5CL%GZT~cQXQ=tp}Ya<Z`Cb)T!hcQ#fO6>!RJP=ZQ^^uQ}%vss5&QmuVK9MujlQEQ2wG9#w(@8>n`XnY"
        "jn02uhwXVG*J!yncCOZ-*504k@2HG`dH<;6vR(`$!4ckbPFR;w%|HtcQnX_C97KX5sTx>yb(ILy;RR7$93~%7(1I^C^*%8R{oVTs9vr&sm}`"
        "|$94^I|0Mq};?E`QFGa)H;!c?8ZmDNJ8d%$9S$*6$j`Q6?vZh!c^>wQG?WXeAKl|Kgf?j(2O0G?hs`62m<M-#<lUAJ>zKiHHrs*U-1<+oNgu"
        "cw|S)Q=8b2OVT)rBUXcz)F6Z*m=S2Qh~=`IPMLXT@8SM>H?*hVqs<-U-d#7|Tnt9<r}r-u+A2YNb-b+f0_;w6ipW>5-gP_d3scUyq^u$OLz%"
        "FzJos?kXK==KaD`KN^49aczQP=;TP#n>o_)E6cmXaXA{?r^2K@yRqAvPqQtbH{ZWB-uu73W>k!ON`67B!x+n7r#bc?X};2Py7$>VL8kG%7sh"
        "#*`*GCwUyE~EJ2$JCuW35yRZcl|a3d@_WM^0;K25si-0hdI@q;b5O+xlqB46hkoebX@<_*c~)5iF&4D-^^@<NY)l2xnJ%Q<?aXR?*~Y_(P|="
        "RYdCO8>x9w_T{;=2-Y|zez0)gKS$=uEpef@6-PeWaXQFJQMh@^HI(>fUkfRpi21xPV(EQkM&WU`@<OYU&P$h^1X&R+q~aG$K0dErrYQ1?hNj"
        "WPG0-nQ*U+7bL<i3VILMzOLogpRy?#JZpk-~l1F<rwO;!V"
    ),
}


class Damaged(ValueError):
    """Raised for data that are not a whole packed model, or declare more bytes than they may hold."""


class TextModel:
    """Codes bytes by the predictions of contexts and of the longest match, mixed in the logistic domain.

    Source: Mahoney 2005, "Adaptive weighing of context models for lossless data compression".
    """

    SQUASH = [min(max(round(4096 / (1 + math.exp(-x / 256))), 1), 4095) for x in range(-2047, 2048)]
    STRETCH = [int(x) - 2047 for x in np.searchsorted(SQUASH, np.arange(4096)).clip(0, 4094)]
    RATES = [(1 << 17) // (2 * n + 3) for n in range(256)]

    def __init__(self, prime: str) -> None:
        # A cell is [probability of a 1 in 1/65536, number of bits seen].
        self.cells: dict[int, list[int]] = {}
        self.weights = [[16000] * 10 for _ in range(3)]
        self.text, self.last, self.start, self.matched = bytearray(b"\0"), dict[bytes, int](), 0, 0
        for byte in zlib.decompress(b85decode(prime), -15) if prime else b"":
            self.code(lambda _, bit: bit, byte)

    def code(self, coded: Callable[[int, int], int], byte: int = 0) -> int:
        """Codes a byte by `coded(probability of a 1 in 1/4096, bit)`, which returns the bit, and learns it."""
        h, place, expected = int.from_bytes(self.text[-8:], "big"), len(self.text) & 3, self.text[self.start]
        # The last bytes, and bytes at distances usual in flatbuffers.
        contexts = [0, *(h & (1 << bits) - 1 for bits in (8, 16, 24, 32, 48))]
        contexts += [x << 2 | place for x in (h & 255, h >> 24 & 255, (h >> 16 & 0xFF00) | h >> 56)]
        bases, node = [(x << 4 | i) << 8 for i, x in enumerate(contexts)], 1
        for shift in range(7, -1, -1):
            cells = [self.cells.setdefault(base | node, [32768, 0]) for base in bases]
            inputs = [self.STRETCH[p >> 4] for p, _ in cells]
            agrees, guess = self.matched > 0 and (expected | 256) >> (shift + 1) == node, expected >> shift & 1
            if agrees:
                cells.append(self.cells.setdefault(-min(self.matched, 32), [48000, 0]))
                inputs.append(self.STRETCH[cells[-1][0] >> 4] * (1 if guess else -1))
            weights = self.weights[agrees * (1 + (self.matched > 15))]
            mixed = sum(map(int.__mul__, inputs, weights)) >> 16
            probability = self.SQUASH[min(max(mixed, -2047), 2047) + 2047]
            bit = coded(probability, byte >> shift & 1)
            error = ((bit << 12) - probability) * 20
            weights[: len(inputs)] = [w + ((x * error + 32768) >> 16) for w, x in zip(weights, inputs, strict=False)]
            for i, cell in enumerate(cells):
                p, n = cell
                cell[0] = p + ((65535 * (bit if i < 9 else bit == guess) - p) * self.RATES[n] >> 16)
                cell[1] = n + (n < 255)
            node = node << 1 | bit
        self.matched, self.start = self.matched + 1 if self.matched and node & 255 == expected else 0, self.start + 1
        self.text.append(node & 255)
        if not self.matched:
            self.start = self.last.get(bytes(self.text[-5:]), 0)
            self.matched = int(self.start > 0)
        self.last[bytes(self.text[-5:])] = len(self.text)
        return node & 255


def decode_text(data: bytes, length: int, prime: str, mixed: bool) -> bytes:
    """Returns the text of `length` bytes from the bytes of arithmetic coding, or of LZMA."""
    if not mixed:
        return lzma.LZMADecompressor(lzma.FORMAT_RAW, None, LZMA).decompress(data, length)
    code, place, low, high = int.from_bytes(data[:4].ljust(4, b"\0"), "big"), 4, 0, 0xFFFFFFFF

    def coded(probability: int, _: int) -> int:
        nonlocal code, place, low, high
        middle = low + ((high - low) * probability >> 12)
        bit = int(code <= middle)
        low, high = (low, middle) if bit else (middle + 1, high)
        while not (low ^ high) >> 24:
            low, high = low << 8 & 0xFFFFFFFF, high << 8 & 0xFFFFFFFF | 255
            code, place = (code << 8 & 0xFFFFFFFF) | int.from_bytes(data[place : place + 1], "big"), place + 1
        return bit

    model = TextModel(prime)
    return bytes(model.code(coded) for _ in range(length))


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

    def __init__(self, text: Reader, allowed: int, first: int):
        self.form, self.dtype = text.number(), DTYPES[text.number()]
        self.shape = rows, columns = text.number(), text.number()
        self.count = rows * columns
        self.bytes = self.count * (1 if self.dtype == "int4" else np.dtype(self.dtype).itemsize)
        if self.form > TEXT or max(rows, columns, self.bytes) > allowed:
            raise Damaged("it declares more bytes than it may hold")
        self.source, self.factor = text.number() if self.form == PRODUCT else 0, text.array("<f4", self.form == PRODUCT)
        minimum, width, *classes = [text.number() for _ in range(4)] if self.form < PRODUCT else (0, 1, 0, 0)
        self.minimum = minimum >> 1 ^ -(minimum & 1)
        of_rows = text.array("|u1", rows) if classes[0] > 1 else np.zeros(rows, np.uint8)
        of_columns = text.array("|u1", columns) if classes[1] > 1 else np.zeros(columns, np.uint8)
        self.levels = text.array("|u1", classes[0] * classes[1] * width).reshape(-1, width)
        self.contexts = np.zeros(0, np.uint16)
        if len(self.levels):
            self.contexts = (first + of_rows[:, None].astype(np.uint16) * classes[1] + of_columns).reshape(-1)

    def values(self, symbols: np.ndarray, text: Reader, extra: Reader) -> Any:
        """Returns the entries of the tensor, from its symbols, the text and the bytes that are not coded."""
        if self.form in (TEXT, RAW):
            return text.take(self.count) if self.form == TEXT else extra.array(self.dtype, self.count)
        dtype = np.dtype("|i1" if self.dtype == "int4" else self.dtype)
        if self.form == FLOAT:
            return self.floats(dtype, symbols, extra)
        if self.form == LENGTH:
            return self.numbers(symbols.astype(np.int64), extra).astype(dtype)
        if self.form in (TABLE, GRID):
            axis, places = extra.number(), symbols.reshape(self.shape).astype(np.int64) + self.minimum
            lines, across = (1, *self.shape)[axis], (1, -1) if axis == 2 else (-1, 1)
            if self.form == GRID:
                return places.astype("<f4") * extra.array("<f4", lines).reshape(across)
            # Of each line: how many values are below zero and above, then those values in order.
            below, above = (extra.array("|u1", lines).astype(np.int64) for _ in range(2))
            zeros = np.cumsum(below + above) - above
            table = np.insert(extra.array(self.dtype, int((below + above).sum())), zeros, 0)
            return table[(zeros + np.arange(lines)).reshape(across) + places]
        values = symbols.astype(dtype) + np.array(self.minimum).astype(dtype)
        return values if self.dtype != "int4" else (values[::2] & 15) | np.pad(values[1::2], (0, self.count % 2)) << 4

    def floats(self, dtype: np.dtype, symbols: np.ndarray, extra: Reader) -> np.ndarray:
        """Returns floats; of their bits, rotated to the left by one, a symbol has the upper 8 (0: all are zero)."""
        size, some = dtype.itemsize, symbols > 0
        parts = np.zeros((len(symbols), size), np.uint8)
        parts[some, :-1] = extra.array("|u1", int(some.sum()) * (size - 1)).reshape(-1, size - 1)
        parts[some, -1] = symbols[some].astype(np.int64) + self.minimum
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
    text = Reader(decode_text(extra.take(coded), length, PRIMES[kind], mixed > 0))
    lengths = np.array([text.number() for _ in range(text.number())], np.int64)
    tensors, first = [], 0
    for _ in range(text.number()):
        tensors.append(Tensor(text, allowed, first))
        first, allowed = first + len(tensors[-1].levels), allowed - tensors[-1].bytes
    width = max(tensor.levels.shape[1] for tensor in tensors)
    if first > MOST_CONTEXTS or width > 256 or not 0 < len(lengths) <= words + 1 or lengths.sum() > words:
        raise Damaged("its tables are damaged")
    levels = np.concatenate([np.pad(t.levels, ((0, 0), (0, width - t.levels.shape[1]))) for t in tensors])
    contexts = np.concatenate([tensor.contexts for tensor in tensors])
    symbols = decode_symbols(extra.array("<u2", words), lengths, contexts, frequencies(levels))
    parts = np.split(symbols, np.cumsum([len(tensor.contexts) for tensor in tensors])[:-1])
    found = [tensor.values(part, text, extra) for tensor, part in zip(tensors, parts, strict=True)]
    found = [found[t.source] * t.factor if t.form == PRODUCT else one for t, one in zip(tensors, found, strict=True)]
    whole = b"".join(one if isinstance(one, bytes) else one.tobytes() for one in found)
    if zlib.crc32(whole) != checksum:
        raise Damaged("it is damaged: its checksum is another one")
    if kind == LITERT:
        return whole
    pairs = zip(json.loads(found[0]), found[1:], strict=True)
    return {name: value if shape is None else value.reshape(shape) for (name, shape), value in pairs}
