//! Copies between memory with different strides.

/// Number of rows and columns that are copied together.
const TILE: u64 = 64;

/// Below this size, an axis makes tiles too small to be worth it.
const FEW: u64 = 16;

const NO_AXIS: ScatterAxis = ScatterAxis {
    size: 1,
    from: 0,
    to: 0,
};

/// A dim of a copy: its number of items, and the distance between them on both sides, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScatterAxis {
    pub(crate) size: u64,
    pub(crate) from: isize,
    pub(crate) to: isize,
}

/// Copies the items of a box to memory with other strides; an axis with `from` 0 repeats the same items.
///
/// # Safety
/// Every item that the axes reach must be readable at `from` and writable at `to`, and the two must not overlap.
pub(crate) unsafe fn scatter(
    from: *const u8,
    to: *mut u8,
    item_bytes: usize,
    axes: impl IntoIterator<Item = ScatterAxis>,
) {
    let mut axes: Vec<ScatterAxis> = axes.into_iter().filter(|axis| axis.size != 1).collect();
    if axes.iter().any(|axis| axis.size == 0) {
        return;
    }
    // Writes in the order of the destination's memory.
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.to.unsigned_abs()));
    merge(&mut axes);
    let mut run_bytes = item_bytes;
    if let Some(last) = axes.last().copied()
        && last.from == item_bytes as isize
        && last.to == item_bytes as isize
    {
        run_bytes *= last.size as usize;
        axes.pop();
    }
    let column = axes.pop().unwrap_or(NO_AXIS);
    // Beside the axis along which writes are adjacent, the one along which reads are: tiles of both stay in the
    // processor's cache.
    let nearest =
        (0..axes.len()).min_by_key(|&at| (axes[at].size < FEW, axes[at].from.unsigned_abs()));
    let row = nearest.map_or(NO_AXIS, |at| axes.remove(at));
    let copy_tile = match run_bytes {
        1 => copy_items::<1>,
        2 => copy_items::<2>,
        4 => copy_items::<4>,
        8 => copy_items::<8>,
        16 => copy_items::<16>,
        _ => copy_runs,
    };
    let mut index = vec![0_u64; axes.len()];
    let (mut from, mut to) = (from, to);
    loop {
        for top in (0..row.size).step_by(TILE as usize) {
            for left in (0..column.size).step_by(TILE as usize) {
                let (top_steps, left_steps) = (top as isize, left as isize);
                let from = from.wrapping_offset(row.from * top_steps + column.from * left_steps);
                let to = to.wrapping_offset(row.to * top_steps + column.to * left_steps);
                let rows = ScatterAxis {
                    size: TILE.min(row.size - top),
                    ..row
                };
                let columns = ScatterAxis {
                    size: TILE.min(column.size - left),
                    ..column
                };
                // SAFETY: the tile consists of items that the axes reach, as the caller guarantees.
                unsafe { copy_tile(from, to, run_bytes, rows, columns) };
            }
        }
        let mut dim = axes.len();
        loop {
            if dim == 0 {
                return;
            }
            dim -= 1;
            let axis = axes[dim];
            index[dim] += 1;
            if index[dim] < axis.size {
                from = from.wrapping_offset(axis.from);
                to = to.wrapping_offset(axis.to);
                break;
            }
            let back = (axis.size - 1) as isize;
            from = from.wrapping_offset(-axis.from * back);
            to = to.wrapping_offset(-axis.to * back);
            index[dim] = 0;
        }
    }
}

/// Joins each axis with the next if together they are one axis with equal distances.
fn merge(axes: &mut Vec<ScatterAxis>) {
    let mut merged: Vec<ScatterAxis> = Vec::with_capacity(axes.len());
    for axis in axes.drain(..) {
        let extent = axis.size as isize;
        match merged.last_mut() {
            Some(outer) if outer.from == axis.from * extent && outer.to == axis.to * extent => {
                *outer = ScatterAxis {
                    size: outer.size * axis.size,
                    ..axis
                };
            }
            _ => merged.push(axis),
        }
    }
    *axes = merged;
}

/// Copies a tile of items of `N` bytes.
unsafe fn copy_items<const N: usize>(
    from: *const u8,
    to: *mut u8,
    _: usize,
    rows: ScatterAxis,
    columns: ScatterAxis,
) {
    if rows.from == N as isize
        && columns.to == N as isize
        && rows.size >= FEW
        && columns.size >= FEW
    {
        // SAFETY: as guaranteed by the caller.
        return unsafe { transpose::<N>(from, to, rows, columns) };
    }
    for row in 0..rows.size as isize {
        for column in 0..columns.size as isize {
            // SAFETY: the caller guarantees both items.
            unsafe {
                let item = from.offset(row * rows.from + column * columns.from);
                let place = to.offset(row * rows.to + column * columns.to);
                place.cast::<[u8; N]>().write(item.cast::<[u8; N]>().read());
            }
        }
    }
}

/// Copies a tile of items that are adjacent along the rows at `from`, and along the columns at `to`.
///
/// Goes through a small buffer, so that each cache line on both sides is used whole at once: where the distances
/// are multiples of a page, the lines of a tile would drive each other out of the cache.
unsafe fn transpose<const N: usize>(
    from: *const u8,
    to: *mut u8,
    rows: ScatterAxis,
    columns: ScatterAxis,
) {
    const SIDE: usize = TILE as usize;
    let mut tile = [[[0_u8; N]; SIDE]; SIDE];
    for (column, line) in tile[..columns.size as usize].iter_mut().enumerate() {
        // SAFETY: the caller guarantees the items, which are adjacent; a tile has at most `TILE` of them.
        unsafe {
            let items = from
                .offset(column as isize * columns.from)
                .cast::<[u8; N]>();
            std::ptr::copy_nonoverlapping(items, line.as_mut_ptr(), rows.size as usize);
        }
    }
    for row in 0..rows.size as usize {
        for (column, items) in tile[..columns.size as usize].iter().enumerate() {
            // SAFETY: the caller guarantees the place.
            unsafe {
                let place = to.offset(row as isize * rows.to).cast::<[u8; N]>();
                place.add(column).write(items[row]);
            }
        }
    }
}

/// Copies a tile of runs of any number of bytes.
unsafe fn copy_runs(
    from: *const u8,
    to: *mut u8,
    run_bytes: usize,
    rows: ScatterAxis,
    columns: ScatterAxis,
) {
    for row in 0..rows.size as isize {
        for column in 0..columns.size as isize {
            // SAFETY: the caller guarantees both runs.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    from.offset(row * rows.from + column * columns.from),
                    to.offset(row * rows.to + column * columns.to),
                    run_bytes,
                );
            }
        }
    }
}
