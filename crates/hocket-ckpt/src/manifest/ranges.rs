//! The check that no two chunks of a manifest lie on the same bytes of a file.

use super::document::ManifestDocument;

/// Returns whether the chunks of each file are in the order of their offsets and do not overlap, if the tensors are
/// taken in the order of their first chunks. Writers order the entries of all files alike, so it is mostly true.
fn are_in_order(document: &ManifestDocument) -> bool {
    let chunked = document.tensors.0.iter();
    let mut chunked: Vec<_> = chunked
        .filter_map(|(_, tensor)| tensor.chunks.as_ref())
        .filter(|chunks| !chunks.file.is_empty())
        .collect();
    chunked.sort_by_cached_key(|chunks| chunks.offset.at(0));
    let mut ends = vec![0_u64; document.files.len()];
    chunked.iter().all(|chunks| {
        let places = chunks.file.iter().zip(chunks.offset.iter());
        places
            .zip(chunks.length.iter())
            .all(|((file, offset), length)| {
                let end = &mut ends[file as usize];
                let follows = *end <= offset;
                *end = offset + length;
                follows
            })
    })
}

/// Checks that no two chunks overlap in a file; shared storage is expressed with `same_as`.
pub(super) fn check(document: &ManifestDocument) -> std::result::Result<(), String> {
    if are_in_order(document) {
        return Ok(());
    }
    let tensors = &document.tensors.0;
    let chunked = || {
        let all = tensors.iter().enumerate();
        all.filter_map(|(number, (_, tensor))| Some((number, tensor.chunks.as_ref()?)))
    };
    // The ranges of each file lie together, those of file `n` from `ends[n - 1]` on.
    let mut ends = vec![0_usize; document.files.len()];
    for (_, chunks) in chunked() {
        for file in chunks.file.iter() {
            ends[file as usize] += 1;
        }
    }
    let mut total = 0;
    for end in &mut ends {
        (total, *end) = (total + *end, total);
    }
    let mut ranges = vec![(0_u64, 0_u64, 0_usize); total];
    for (number, chunks) in chunked() {
        let places = chunks.file.iter().zip(chunks.offset.iter());
        for ((file, offset), length) in places.zip(chunks.length.iter()) {
            let next = &mut ends[file as usize];
            ranges[*next] = (offset, length, number);
            *next += 1;
        }
    }
    let mut from = 0;
    for (file, to) in document.files.iter().zip(ends) {
        let of_file = &mut ranges[from..to];
        of_file
            .sort_unstable_by_key(|&(offset, length, number)| (offset, length, &tensors[number].0));
        for pair in of_file.windows(2) {
            let ((offset, length, number), (next_offset, _, next_number)) = (pair[0], pair[1]);
            if next_offset < offset + length {
                return Err(format!(
                    "tensors `{}` and `{}` claim the same bytes of `{}` at {next_offset}",
                    tensors[number].0, tensors[next_number].0, file.path
                ));
            }
        }
        from = to;
    }
    Ok(())
}
