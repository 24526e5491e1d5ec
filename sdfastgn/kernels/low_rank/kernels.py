"""The Triton kernel of ``add_low_rank``. Op and launch: ``low_rank/op.py``.

A program computes one tile of one matrix: it loads the tile of the weight, adds the scaled product b @ a of
each pair of factors, and stores the sum. One launch computes many matrices, so the kernel reads addresses and
sizes from tables:

- ``tiles``: int32 (programs, 2). A row has the index of a program's matrix, and the index of the tile in this
  matrix;
- ``matrices``: int64 (matrices, 7). A row has the addresses of out and weight, the numbers of rows and
  columns, the number ``inner`` explained below, the index of the matrix's first pair in ``factors``, and the
  number of its pairs;
- ``factors``: int64 (pairs, 7). A row has the addresses of a and b, the rank, the strides of a along the rank
  and along the inner and the outer index of a column, and the row stride of b. The pairs of a matrix are
  consecutive;
- ``scales``: fp32 (pairs,).

Columns of a matrix are in the order of the weight's memory. For a convolution, a column stands for an input
channel and a tap: one of the height * width positions in the convolution's window. The column's inner index
is column % inner, and its outer index is column // inner. If the weight is channels-last, the input channel
is the inner index and the tap the outer one, else the other way round. Factor a may have its columns in
another order, so there is a stride of a for each of the two indices.

Offsets are int32, so a matrix has less than 2^31 elements.

Numerics: the kernel computes products and sums in fp32, and rounds once when it stores.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_low_rank_kernel(
    tiles_ptr, matrices_ptr, factors_ptr, scales_ptr,
    WEIGHT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    LOOPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program computes out = weight + sum of scale * b @ a for one tile.

    Constants:
        WEIGHT, A, B: dtypes of weight and out, of a and of b.
        BLOCK: number of ranks in a block, a multiple of ``DEPTH``. The compiler unrolls the loop over the
            ranks of a block.
        DEPTH: number of ranks that one ``tl.dot`` multiplies.
        LOOPS: False if no pair has more than ``BLOCK`` ranks. The kernel then computes one block for each
            pair, and multiplies zeros beyond the pair's rank. If True, the kernel computes as many blocks
            as each pair needs.
        ROWS, COLUMNS: size of a tile.
        ALIGNED: True if all addresses of weight and out are multiples of 16 bytes, and all numbers of columns
            are multiples of 8.
    """
    program = tl.program_id(0)
    matrix = matrices_ptr + tl.load(tiles_ptr + 2 * program) * 7
    tile = tl.load(tiles_ptr + 2 * program + 1)
    out = tl.load(matrix).to(tl.pointer_type(WEIGHT))
    weight = tl.load(matrix + 1).to(tl.pointer_type(WEIGHT))
    rows = tl.load(matrix + 2).to(tl.int32)
    columns = tl.load(matrix + 3).to(tl.int32)
    inner = tl.load(matrix + 4).to(tl.int32)
    first = tl.load(matrix + 5).to(tl.int32)
    pairs = tl.load(matrix + 6).to(tl.int32)
    # ``multiple_of`` tells Triton how the addresses are aligned, which it does not know of addresses from a
    # table. Otherwise it would load and store element by element.
    if ALIGNED:
        out = tl.multiple_of(out, 16)
        weight = tl.multiple_of(weight, 16)
        columns = tl.multiple_of(columns, 8)

    across = tl.cdiv(columns, COLUMNS)
    m = (tile // across) * ROWS + tl.arange(0, ROWS)
    n = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    in_tile = (m < rows)[:, None] & (n < columns)[None, :]
    at = m[:, None] * columns + n[None, :]
    base = tl.load(weight + at, mask=in_tile, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for pair in range(first, first + pairs):
        factor = factors_ptr + pair * 7
        a = tl.load(factor).to(tl.pointer_type(A))
        b = tl.load(factor + 1).to(tl.pointer_type(B))
        rank = tl.load(factor + 2).to(tl.int32)
        a_row = tl.load(factor + 3).to(tl.int32)
        a_inner = tl.load(factor + 4).to(tl.int32)
        a_outer = tl.load(factor + 5).to(tl.int32)
        b_row = tl.load(factor + 6).to(tl.int32)
        a_at = (n % inner) * a_inner + (n // inner) * a_outer
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in tl.range(0, rank if LOOPS else BLOCK, BLOCK, num_stages=1):
            # ``BLOCK`` is a constant, so the compiler unrolls this loop. It cannot unroll a loop up to
            # ``rank``. With such a loop the kernel took 40 % longer on an H100, for SDXL's linear layers and
            # rank 16.
            for start in tl.static_range(0, BLOCK, DEPTH):
                k = block + start + tl.arange(0, DEPTH)
                in_b = (m < rows)[:, None] & (k < rank)[None, :]
                in_a = (k < rank)[:, None] & (n < columns)[None, :]
                left = tl.load(b + m[:, None] * b_row + k[None, :], mask=in_b, other=0.0)
                right = tl.load(a + k[:, None] * a_row + a_at[None, :], mask=in_a, other=0.0)
                if A != B:
                    left = left.to(tl.float32)
                    right = right.to(tl.float32)
                product = tl.dot(left, right, product, input_precision="ieee")
        total += tl.load(scales_ptr + pair) * product
    tl.store(out + at, (base.to(tl.float32) + total).to(WEIGHT), mask=in_tile)
