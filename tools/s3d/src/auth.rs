//! Authentication of requests: by one key, or by keys whose names contain their expiry.

use s3s::auth::{S3Auth, SecretKey};
use s3s::{S3Result, s3_error};

use crate::store::now_ms;

/// The keys of this server.
pub struct Keys {
    /// The access key, or the prefix of access keys that expire.
    pub access_key: String,
    /// The secret key, shared by all access keys.
    pub secret_key: String,
    /// Whether access keys have the form `{access_key}-{ms}` and expire that many milliseconds after 1970.
    pub expire: bool,
}

#[async_trait::async_trait]
impl S3Auth for Keys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let is_known = if self.expire {
            let until = access_key
                .strip_prefix(&self.access_key)
                .and_then(|rest| rest.strip_prefix('-')?.parse::<u64>().ok());
            if until.is_some_and(|until| until <= now_ms()) {
                return Err(s3_error!(
                    ExpiredToken,
                    "the key was good until {} ms after 1970",
                    until.unwrap_or_default()
                ));
            }
            until.is_some()
        } else {
            access_key == self.access_key
        };
        if is_known {
            return Ok(self.secret_key.clone().into());
        }
        Err(s3_error!(
            InvalidAccessKeyId,
            "the access key is none of this server"
        ))
    }
}
