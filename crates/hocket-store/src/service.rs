//! The services that a URI can name: schemes, environment variables, remedies.

/// The supported protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Service {
    S3,
    /// Oracle's, through its S3-compatible endpoint.
    Oci,
    Gcs,
    Azure,
    /// Plain HTTP, read-only.
    Http,
    Https,
    /// A hub of Hugging Face, read-only.
    Hub,
}

impl Service {
    pub(crate) fn of(scheme: &str) -> Option<Self> {
        Some(match scheme {
            "s3" => Self::S3,
            "oci" => Self::Oci,
            "gs" => Self::Gcs,
            "az" | "azure" | "abfs" | "abfss" => Self::Azure,
            "http" => Self::Http,
            "https" => Self::Https,
            "hf" => Self::Hub,
            _ => return None,
        })
    }

    /// Returns whether URIs of the service are web addresses, which are percent-encoded.
    pub(crate) fn is_web(self) -> bool {
        matches!(self, Self::Http | Self::Https)
    }

    /// Returns why the service does not support the operation `verb`, if it does not.
    pub(crate) fn refusal(self, verb: &str) -> Option<&'static str> {
        match self {
            Self::Http | Self::Https => Some("plain HTTP only supports reading objects by name"),
            Self::Hub if verb != "list" => {
                Some("a repository of a hub is read here, and is written with `hf upload`")
            }
            _ => None,
        }
    }

    /// Returns the name prefixes of the service's environment variables.
    pub(crate) fn variables(self) -> &'static [&'static str] {
        match self {
            // `HOME` has the folder of the profiles.
            Self::S3 => &["AWS_", "S3_ENDPOINT_URL", "MOSAICML_STREAMING_AWS_", "HOME"],
            Self::Oci => &["AWS_", "S3_ENDPOINT_URL", "OCI_REGION"],
            Self::Gcs => &["GOOGLE_", "STORAGE_EMULATOR_HOST"],
            Self::Azure => &["AZURE_"],
            // `HOME` and the cache folder have the file with the token.
            Self::Hub => &[
                "HF_",
                "HUGGING_FACE_HUB_TOKEN",
                "TRANSFORMERS_OFFLINE",
                "XDG_CACHE_HOME",
                "HOME",
            ],
            Self::Http | Self::Https => &[],
        }
    }

    /// Returns the variable that holds the service's endpoint, if there is one.
    pub(crate) fn endpoint_variable(self) -> Option<&'static str> {
        match self {
            Self::S3 | Self::Oci => Some("AWS_ENDPOINT_URL"),
            Self::Gcs => Some("STORAGE_EMULATOR_HOST"),
            Self::Azure => Some("AZURE_STORAGE_ENDPOINT"),
            Self::Hub => Some("HF_ENDPOINT"),
            Self::Http | Self::Https => None,
        }
    }

    /// Returns the remedy to name when access is refused.
    pub(crate) fn credentials_help(self) -> &'static str {
        match self {
            Self::S3 => {
                "check the keys (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, or those of \
                 `AWS_PROFILE`) and their permissions"
            }
            Self::Oci => {
                "check the customer secret key in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` and its permissions"
            }
            Self::Gcs => {
                "check `GOOGLE_APPLICATION_CREDENTIALS` or `GOOGLE_SERVICE_ACCOUNT`, and the account's permissions"
            }
            Self::Azure => {
                "check `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY` (or `AZURE_STORAGE_SAS_TOKEN`), \
                 and their permissions"
            }
            Self::Hub => {
                "give the token of an account that has access (`HF_TOKEN`, or `hf auth login`)"
            }
            Self::Http | Self::Https => {
                "the server requires a login, which is not supported over plain HTTP"
            }
        }
    }
}
