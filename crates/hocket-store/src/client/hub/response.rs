//! The headers of a hub's responses: redirects, sizes, entity tags, pages.

use crate::error::StoreError;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, LINK, LOCATION};
use object_store::client::HttpResponse;
use std::ops::Range;
use url::Url;

/// The entity tag and the size of a file, as far as responses have named them.
#[derive(Debug, Clone, Default)]
pub(super) struct FileVersion {
    /// With quotes.
    pub(super) etag: Option<String>,
    pub(super) size: Option<u64>,
}

impl FileVersion {
    /// Takes the version from a response that redirects to a storage, which names that of the linked file.
    pub(super) fn note_link(&mut self, answer: &HttpResponse) {
        self.etag = self
            .etag
            .take()
            .or_else(|| header(answer, "x-linked-etag").map(quoted));
        self.size = self
            .size
            .or_else(|| header(answer, "x-linked-size")?.parse().ok());
    }

    /// Completes the version from the response with the file.
    pub(super) fn note_file(&mut self, answer: &HttpResponse) {
        self.note_link(answer);
        self.etag = self
            .etag
            .take()
            .or_else(|| header(answer, ETAG.as_str()).map(quoted));
        let length = || header(answer, CONTENT_LENGTH.as_str())?.parse().ok();
        self.size = match content_range(answer) {
            Some((_, size)) => Some(size),
            None => self.size.or_else(length),
        };
    }
}

/// Returns the range and the size of the whole file in a partial response.
pub(super) fn content_range(answer: &HttpResponse) -> Option<(Range<u64>, u64)> {
    let text = header(answer, CONTENT_RANGE.as_str())?.strip_prefix("bytes ")?;
    let (range, size) = text.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let last: u64 = last.parse().ok()?;
    Some((
        first.parse().ok()?..last.checked_add(1)?,
        size.parse().ok()?,
    ))
}

/// Returns the address that a response redirects to.
pub(super) fn redirect(answer: &HttpResponse, from: &Url) -> Option<Url> {
    let is_redirect = matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308);
    let location = header(answer, LOCATION.as_str()).filter(|_| is_redirect)?;
    from.join(location).ok()
}

/// Returns the cursor of the next page of a listing; none on the last page.
///
/// # Errors
/// [`StoreError::Io`] for a link to a next page without a cursor: the listing would end early in silence.
pub(super) fn next_cursor(answer: &HttpResponse, from: &Url) -> Result<Option<String>, StoreError> {
    let values = answer.headers().get_all(LINK).iter();
    // An address may have commas, so the brackets tell links apart.
    let mut links = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split('<').skip(1))
        .filter_map(|link| link.split_once('>'));
    let is_next = |rest: &str| rest.contains("rel=\"next\"") || rest.contains("rel=next");
    let Some((address, _)) = links.find(|(_, rest)| is_next(rest)) else {
        return Ok(None);
    };
    let cursor = from.join(address).ok().and_then(|url| {
        let mut query = url.query_pairs();
        let (_, value) = query.find(|(name, _)| name == "cursor")?;
        Some(value.into_owned())
    });
    cursor.map(Some).ok_or_else(|| {
        StoreError::io(
            from.origin().ascii_serialization(),
            "a listing has a next page without a `cursor`; check `HF_ENDPOINT`",
        )
    })
}

/// Returns an entity tag in quotes and without the mark of a weak one, which compression adds.
pub(super) fn quoted(tag: &str) -> String {
    format!("\"{}\"", tag.trim_start_matches("W/").trim_matches('"'))
}

fn header<'a>(answer: &'a HttpResponse, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}
