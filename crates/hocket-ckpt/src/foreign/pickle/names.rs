//! The names that a pickle of torch may contain. All of them are inert: nothing is imported or called.

use crate::format::dtypes::TorchDtype;

/// The meaning of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GlobalMeaning {
    /// `Metadata` of a distributed checkpoint.
    Metadata,
    TensorStorage,
    BytesStorage,
    ChunkStorage,
    Properties,
    MemoryFormat,
    Index,
    StorageMeta,
    StorageInfo,
    /// `torch.Size`, read as its tuple.
    Size,
    Dtype(TorchDtype),
    Layout,
    Path,
    OrderedDict,
    Set,
    Tuple,
    /// `_codecs.encode`, by which protocol 2 writes bytes.
    Encode,
    RebuildTensor,
    /// With the dtype as a separate argument.
    RebuildTensorV3,
    RebuildParameter,
    /// A typed storage, by its dtype.
    Storage(TorchDtype),
    UntypedStorage,
    NumpyReconstruct,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    TimeDelta,
    /// `bytes`, by which protocol 2 writes empty bytes.
    Bytes,
    /// `collections.defaultdict`, read as a plain mapping; its factory is dropped.
    DefaultDict,
    /// `collections.deque`, read as a list; its maximum length is dropped.
    Deque,
    /// A known name that cannot be represented, by its index in [`INERT`].
    Inert(u8),
    /// An unlisted name, by its index in the pickle's own table. It is never imported or called.
    Other(u32),
}

/// The list of names that are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllowedGlobals {
    /// The `.metadata` of a distributed checkpoint.
    Metadata,
    /// Files of `torch.save`; storages are persistent ids.
    TorchSave,
}

/// Further names that `torch.load` accepts without trust, with a description. A leaf with such a name is
/// reported by that description, and the rest is read.
const INERT: [(&str, &str); 18] = [
    ("builtins.bytearray", "bytearray"),
    ("builtins.complex", "complex number"),
    ("collections.Counter", "collections.Counter"),
    ("torch.device", "torch.device"),
    ("torch._utils._rebuild_sparse_tensor", "sparse tensor"),
    ("torch._utils._rebuild_qtensor", "quantized tensor"),
    (
        "torch._utils._rebuild_meta_tensor_no_storage",
        "tensor without data (meta)",
    ),
    ("torch.qint32", "torch.qint32"),
    ("torch.quint4x2", "torch.quint4x2"),
    ("torch.quint2x4", "torch.quint2x4"),
    ("torch.QInt32Storage", "torch.qint32"),
    ("torch.QUInt4x2Storage", "torch.quint4x2"),
    ("torch.QUInt2x4Storage", "torch.quint2x4"),
    ("torch.per_tensor_affine", "torch.qscheme"),
    ("torch.per_tensor_symmetric", "torch.qscheme"),
    ("torch.per_channel_affine", "torch.qscheme"),
    ("torch.per_channel_symmetric", "torch.qscheme"),
    ("torch.per_channel_affine_float_qparams", "torch.qscheme"),
];

/// Returns the meaning of `module.name` if it is allowed.
pub(crate) fn look_up(allowed: AllowedGlobals, module: &str, name: &str) -> Option<GlobalMeaning> {
    if let Some(found) = look_up_shared(module, name) {
        return Some(found);
    }
    match allowed {
        AllowedGlobals::Metadata => look_up_metadata(module, name),
        AllowedGlobals::TorchSave => look_up_torch_save(module, name),
    }
}

fn look_up_shared(module: &str, name: &str) -> Option<GlobalMeaning> {
    match (module, name) {
        ("torch", "Size") => Some(GlobalMeaning::Size),
        ("torch", name) => TorchDtype::parse(name).map(GlobalMeaning::Dtype),
        ("torch.serialization", "_get_layout") => Some(GlobalMeaning::Layout),
        ("collections", "OrderedDict") => Some(GlobalMeaning::OrderedDict),
        ("builtins" | "__builtin__", "set") => Some(GlobalMeaning::Set),
        ("builtins" | "__builtin__", "tuple") => Some(GlobalMeaning::Tuple),
        _ => None,
    }
}

fn look_up_metadata(module: &str, name: &str) -> Option<GlobalMeaning> {
    const DCP: &str = "torch.distributed.checkpoint.metadata";
    const OLD: &str = "torch.distributed._shard.sharded_tensor.metadata";
    const BYTE: &str = "bytecheckpoint.checkpointer.meta_type";
    match (module, name) {
        (DCP | BYTE, "Metadata") => Some(GlobalMeaning::Metadata),
        (DCP, "TensorStorageMetadata") => Some(GlobalMeaning::TensorStorage),
        (DCP, "BytesStorageMetadata") => Some(GlobalMeaning::BytesStorage),
        (DCP, "ChunkStorageMetadata") => Some(GlobalMeaning::ChunkStorage),
        (DCP | OLD, "TensorProperties") => Some(GlobalMeaning::Properties),
        (DCP, "_MEM_FORMAT_ENCODING") | (OLD, "MEM_FORMAT_ENCODING") => {
            Some(GlobalMeaning::MemoryFormat)
        }
        (DCP, "MetadataIndex") => Some(GlobalMeaning::Index),
        (DCP, "StorageMeta") => Some(GlobalMeaning::StorageMeta),
        ("torch.distributed.checkpoint.filesystem" | BYTE, "_StorageInfo") => {
            Some(GlobalMeaning::StorageInfo)
        }
        (
            "pathlib" | "pathlib._local",
            "PosixPath" | "WindowsPath" | "PurePosixPath" | "PureWindowsPath",
        ) => Some(GlobalMeaning::Path),
        _ => None,
    }
}

fn look_up_torch_save(module: &str, name: &str) -> Option<GlobalMeaning> {
    const NUMPY: [&str; 2] = ["numpy.core.multiarray", "numpy._core.multiarray"];
    match (module, name) {
        ("torch._utils", "_rebuild_tensor_v2") => Some(GlobalMeaning::RebuildTensor),
        ("torch._utils", "_rebuild_tensor_v3") => Some(GlobalMeaning::RebuildTensorV3),
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
            Some(GlobalMeaning::RebuildParameter)
        }
        ("torch.storage", "UntypedStorage") => Some(GlobalMeaning::UntypedStorage),
        ("torch", name) if TorchDtype::of_storage(name).is_some() => {
            TorchDtype::of_storage(name).map(GlobalMeaning::Storage)
        }
        ("builtins" | "__builtin__", "bytes") => Some(GlobalMeaning::Bytes),
        ("_codecs", "encode") => Some(GlobalMeaning::Encode),
        // Names used by the generator states and timestamps in trainers' files.
        (module, "_reconstruct") if NUMPY.contains(&module) => {
            Some(GlobalMeaning::NumpyReconstruct)
        }
        (module, "scalar") if NUMPY.contains(&module) => Some(GlobalMeaning::NumpyScalar),
        ("numpy", "ndarray") => Some(GlobalMeaning::NumpyArray),
        ("numpy", "dtype") => Some(GlobalMeaning::NumpyDtype),
        ("datetime", "timedelta") => Some(GlobalMeaning::TimeDelta),
        ("collections", "defaultdict") => Some(GlobalMeaning::DefaultDict),
        ("collections", "deque") => Some(GlobalMeaning::Deque),
        ("__builtin__", name) => inert("builtins", name),
        _ => inert(module, name),
    }
}

fn inert(module: &str, name: &str) -> Option<GlobalMeaning> {
    let is_it = |full: &str| full.rsplit_once('.') == Some((module, name));
    let index = INERT.iter().position(|(full, _)| is_it(full))?;
    u8::try_from(index).ok().map(GlobalMeaning::Inert)
}

impl GlobalMeaning {
    /// Returns a name for error messages; unlisted names are shown by [`super::DecodedPickle::shown`].
    pub(super) fn shown(self) -> &'static str {
        match self {
            Self::Dtype(dtype) | Self::Storage(dtype) => dtype.name(),
            Self::Inert(index) => INERT.get(usize::from(index)).map_or("object", |it| it.1),
            Self::TimeDelta => "datetime.timedelta",
            Self::NumpyArray | Self::NumpyReconstruct => "numpy.ndarray",
            Self::NumpyScalar => "numpy.scalar",
            Self::NumpyDtype => "numpy.dtype",
            Self::Set => "set",
            Self::Bytes => "bytes",
            Self::Layout => "torch.layout",
            _ => "object",
        }
    }
}
