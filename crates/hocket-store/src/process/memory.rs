//! Huge pages for newly allocated memory.

use std::mem::MaybeUninit;

const HUGE_PAGE: usize = 1 << 21;

/// Asks the kernel to back `spare` with huge pages where it contains whole ones. The first access then costs a
/// fraction of the cost with small pages. This is advice: the kernel may ignore it.
pub fn prefer_huge_pages(spare: &mut [MaybeUninit<u8>]) {
    let skipped = spare.as_ptr().align_offset(HUGE_PAGE);
    let len = spare.len().saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
    let Some(pages) = spare
        .get_mut(skipped..skipped + len)
        .filter(|pages| !pages.is_empty())
    else {
        return;
    };
    // Other systems choose the size of pages themselves.
    #[cfg(not(target_os = "linux"))]
    let _ = pages;
    // SAFETY: the range is borrowed exclusively and lies within one allocation; the advice changes no contents.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::madvise(pages.as_mut_ptr().cast(), pages.len(), libc::MADV_HUGEPAGE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_any_size_and_address_is_accepted() {
        for bytes in [0, 1, HUGE_PAGE - 1, 5 * HUGE_PAGE + 7] {
            let mut memory = Vec::with_capacity(bytes);
            prefer_huge_pages(memory.spare_capacity_mut());
            memory.resize(bytes, 7u8);
            assert!(memory.iter().all(|&byte| byte == 7));
        }
    }
}
