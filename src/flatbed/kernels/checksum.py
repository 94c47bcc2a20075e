"""One launch over all weights of a model: a number per piece of memory that any small change changes."""

import triton
import triton.language as tl


@triton.jit
def checksum_kernel(pieces, out, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """`pieces` int64 [n, 3]: address, number of 8-byte words (at most WORDS), number of the first word; out int64 [n].

    The sum of word times m(number of the word), modulo 2**64. m is odd, so one changed word always changes the sum; and
    it differs from word to word, so words that changed places change it too. Differences of m are even: lest they lose
    the highest bit (the sign of a number: x and -x that changed places), the upper half of a word is first folded into
    the lower one.
    """
    piece = tl.program_id(0)
    address = tl.load(pieces + piece * 3).to(tl.pointer_type(tl.int64))
    count = tl.load(pieces + piece * 3 + 1)
    first = tl.load(pieces + piece * 3 + 2)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, WORDS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = tl.load(address + at, mask=at < count, other=0)
        word ^= (word >> 32) & 0xFFFFFFFF
        number = first + at
        mixed = (number ^ (number >> 7)) * 0x9E3779B97F4A7C1 + number * 0x2545F4914F6CDD1
        total += word * (mixed * 2 + 1)
    tl.store(out + piece, tl.sum(total, 0))
