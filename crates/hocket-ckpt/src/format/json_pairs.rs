//! JSON objects in their original order.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde::{Serialize, Serializer};

/// The entries of a JSON object in their original order. Duplicate keys are rejected if `UNIQUE`, and kept
/// otherwise; a map would keep the last.
pub struct JsonPairs<T, const UNIQUE: bool>(pub Vec<(String, T)>);

impl<'de, T: Deserialize<'de>, const UNIQUE: bool> Deserialize<'de> for JsonPairs<T, UNIQUE> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}

impl<T: Serialize, const UNIQUE: bool> Serialize for JsonPairs<T, UNIQUE> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

struct PairsVisitor<T, const UNIQUE: bool>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const UNIQUE: bool> Visitor<'de> for PairsVisitor<T, UNIQUE> {
    type Value = JsonPairs<T, UNIQUE>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        let mut seen = HashSet::new();
        while let Some((key, value)) = map.next_entry::<String, T>()? {
            if UNIQUE && !seen.insert(key.clone()) {
                return Err(A::Error::custom(format!("`{key}` is listed twice")));
            }
            pairs.push((key, value));
        }
        Ok(JsonPairs(pairs))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const TWICE: &str = r#"{"b": 1, "a": 2, "b": 3}"#;

    #[test]
    fn duplicate_keys_are_kept_or_rejected() {
        let JsonPairs(kept) = serde_json::from_str::<JsonPairs<u32, false>>(TWICE).unwrap();
        let kept: Vec<_> = kept.iter().map(|(key, value)| (&**key, *value)).collect();
        assert_eq!(kept, [("b", 1), ("a", 2), ("b", 3)]);
        let refused = serde_json::from_str::<JsonPairs<u32, true>>(TWICE)
            .err()
            .unwrap();
        assert!(refused.to_string().contains("`b` is listed twice"));
        assert!(serde_json::from_str::<JsonPairs<u32, false>>("[]").is_err());
    }
}
