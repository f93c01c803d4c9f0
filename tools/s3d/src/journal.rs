//! The on-disk record of the buckets' contents: a journal with one line per change.
//!
//! Appending a line is the commit of a change, so neither a reader nor a server started after a kill sees part
//! of one. Every start rewrites the journal without its history.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::pieces::Piece;

/// An object's record, without its bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Object {
    /// Size in bytes.
    pub size: u64,
    /// The ETag without its quotes.
    pub etag: String,
    /// Time of the last change in milliseconds since 1970.
    pub modified_ms: u64,
    /// Its data files, in order.
    pub pieces: Vec<Piece>,
    /// The `Content-Type` of its upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// The `x-amz-meta-*` headers of its upload.
    #[serde(default, skip_serializing_if = "HashMap::is_empty")]
    pub metadata: HashMap<String, String>,
    /// Checksums of the whole object in base64, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub checksums: BTreeMap<String, String>,
}

/// The objects of a bucket by key.
pub type Bucket = BTreeMap<String, Object>;

/// All buckets by name.
pub type Buckets = BTreeMap<String, Bucket>;

/// One change.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Creates a bucket.
    Create {
        /// Its name.
        bucket: String,
    },
    /// Removes an empty bucket.
    Drop {
        /// Its name.
        bucket: String,
    },
    /// Adds or replaces an object.
    Put {
        /// Its bucket.
        bucket: String,
        /// Its key.
        key: String,
        /// The new object.
        object: Object,
    },
    /// Removes an object.
    Delete {
        /// Its bucket.
        bucket: String,
        /// Its key.
        key: String,
    },
}

impl Change {
    /// Applies the change; returns the object that it replaced or removed.
    pub fn apply(self, buckets: &mut Buckets) -> Option<Object> {
        match self {
            Self::Create { bucket } => {
                buckets.entry(bucket).or_default();
                None
            }
            Self::Drop { bucket } => {
                buckets.remove(&bucket);
                None
            }
            Self::Put {
                bucket,
                key,
                object,
            } => buckets.entry(bucket).or_default().insert(key, object),
            Self::Delete { bucket, key } => buckets
                .get_mut(&bucket)
                .and_then(|bucket| bucket.remove(&key)),
        }
    }
}

/// The journal's file, open for appending.
pub struct Journal {
    file: File,
    length: u64,
}

impl Journal {
    /// Reads the journal at `path` and rewrites it without its history. A last line truncated by a kill is a
    /// change that was never acknowledged, and is left out.
    ///
    /// # Errors
    /// The file cannot be read or written, or contains a complete line that is not a change.
    pub fn open(path: PathBuf) -> io::Result<(Self, Buckets)> {
        let buckets = read(&path)?;
        let part = path.with_extension("part");
        let mut journal = Self {
            file: File::create(&part)?,
            length: 0,
        };
        for (bucket, objects) in &buckets {
            journal.append(&Change::Create {
                bucket: bucket.clone(),
            })?;
            for (key, object) in objects {
                let (bucket, key, object) = (bucket.clone(), key.clone(), object.clone());
                journal.append(&Change::Put {
                    bucket,
                    key,
                    object,
                })?;
            }
        }
        std::fs::rename(&part, &path)?;
        journal.file = OpenOptions::new().append(true).open(&path)?;
        Ok((journal, buckets))
    }

    /// Appends one change. After an error the file is unchanged.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&mut self, change: &Change) -> io::Result<()> {
        let mut line = serde_json::to_vec(change)?;
        line.push(b'\n');
        let written = self.file.write_all(&line);
        if written.is_err() {
            self.file.set_len(self.length)?;
        } else {
            self.length += line.len() as u64;
        }
        written
    }
}

fn read(path: &Path) -> io::Result<Buckets> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Buckets::new()),
        Err(error) => return Err(error),
    };
    let mut buckets = Buckets::new();
    let whole = text
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |end| end + 1);
    for (number, line) in text[..whole]
        .split(|byte| *byte == b'\n')
        .enumerate()
        .filter(|(_, line)| !line.is_empty())
    {
        let change: Change = serde_json::from_slice(line).map_err(|error| {
            let place = format!("{}:{}: {error}", path.display(), number + 1);
            io::Error::new(io::ErrorKind::InvalidData, place)
        })?;
        change.apply(&mut buckets);
    }
    Ok(buckets)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn a_journal_comes_back_without_its_history_and_without_a_torn_line() {
        let path = std::env::temp_dir().join(format!("s3d-journal-{}", std::process::id()));
        let put = |key: &str, size| Change::Put {
            bucket: "b".into(),
            key: key.into(),
            object: Object {
                size,
                ..Object::default()
            },
        };
        let (mut journal, buckets) = Journal::open(path.clone()).unwrap();
        assert!(buckets.is_empty());
        for change in [put("x", 1), put("x/y", 2), put("x", 3), put("z\n\"", 4)] {
            journal.append(&change).unwrap();
        }
        journal
            .append(&Change::Delete {
                bucket: "b".into(),
                key: "x/y".into(),
            })
            .unwrap();
        let mut torn = OpenOptions::new().append(true).open(&path).unwrap();
        torn.write_all(b"{\"put\":{\"bucket\":\"b\",\"ke").unwrap();
        let (_, buckets) = Journal::open(path.clone()).unwrap();
        let sizes: Vec<_> = buckets["b"]
            .iter()
            .map(|(key, object)| (key.as_str(), object.size))
            .collect();
        assert_eq!(sizes, [("x", 3), ("z\n\"", 4)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
        std::fs::write(&path, b"nonsense\n").unwrap();
        assert!(
            Journal::open(path.clone())
                .err()
                .unwrap()
                .to_string()
                .contains(":1:")
        );
        std::fs::remove_file(path).unwrap();
    }
}
