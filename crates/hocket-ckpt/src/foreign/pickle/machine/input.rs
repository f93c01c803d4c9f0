//! Reads of the bytes of a pickle.

use super::{PickleMachine, Result};
use crate::foreign::pickle::tree::PickleFault;

impl<'a> PickleMachine<'a> {
    pub(super) fn take(&mut self, length: u64) -> Result<&'a [u8]> {
        let end = usize::try_from(length)
            .ok()
            .and_then(|length| self.at.checked_add(length));
        let bytes = end.and_then(|end| self.input.get(self.at..end));
        let Some(bytes) = bytes else {
            return Err(PickleFault::Broken(format!(
                "{length} bytes are announced at byte {}, {} are left",
                self.at,
                self.input.len().saturating_sub(self.at)
            )));
        };
        self.at += bytes.len();
        Ok(bytes)
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?.first().copied().unwrap_or_default())
    }

    /// Reads a little-endian number of `length` bytes, at most eight.
    pub(super) fn number(&mut self, length: u64) -> Result<u64> {
        let bytes = self.take(length)?;
        Ok(bytes
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    pub(super) fn line(&mut self) -> Result<&'a str> {
        let rest = self.input.get(self.at..).unwrap_or_default();
        let end = rest.iter().take(512).position(|&byte| byte == b'\n');
        let line = end.and_then(|end| rest.get(..end));
        let text = line.and_then(|line| std::str::from_utf8(line).ok());
        let Some(text) = text else {
            return Err(PickleFault::Broken(format!(
                "a name at byte {} has no end, or is no text",
                self.at
            )));
        };
        self.at += text.len() + 1;
        Ok(text)
    }
}
