"""Tools, as `composer.utils`."""

from hocket.compat.composer.absent import absent_from
from hocket.compat.composer.utils import dist, dist_checkpoint, module_surgery, reproducibility
from hocket.compat.composer.utils.batch import batch_get, batch_set
from hocket.compat.composer.utils.checkpoint import (
    glob_filter,
    load_checkpoint,
    safe_torch_load,
    save_checkpoint,
)
from hocket.compat.composer.utils.data import add_vision_dataset_transform, create_interval_scheduler
from hocket.compat.composer.utils.environment import (
    VersionedDeprecationWarning,
    configure_excepthook,
    disable_env_report,
    enable_env_report,
    get_composer_env_dict,
    is_hpu_installed,
    is_notebook,
    is_xla_installed,
    print_env,
)
from hocket.compat.composer.utils.files import (
    KNOWN_COMPRESSORS,
    CliCompressor,
    CompressorNotFound,
    IteratorFileStream,
    create_symlink_file,
    ensure_folder_has_no_conflicting_files,
    ensure_folder_is_empty,
    extract_path_from_symlink,
    get_compressor,
    is_compressed_pt,
    is_tar,
)
from hocket.compat.composer.utils.hparams import (
    convert_flat_dict_to_nested_dict,
    convert_nested_dict_to_flat_dict,
    extract_hparams,
)
from hocket.compat.composer.utils.inference import (
    ExportFormat,
    Transform,
    export_for_inference,
    export_with_logger,
)
from hocket.compat.composer.utils.names import (
    FORMAT_NAME_WITH_DIST_AND_TIME_TABLE,
    FORMAT_NAME_WITH_DIST_TABLE,
    MLFLOW_EXPERIMENT_ID_FORMAT_KEY,
    MLFLOW_RUN_ID_FORMAT_KEY,
    PartialFilePath,
    format_name_with_dist,
    format_name_with_dist_and_time,
    get_save_filename,
    partial_format,
)
from hocket.compat.composer.utils.object_store import (
    GCSObjectStore,
    ObjectStore,
    ObjectStoreTransientError,
    OCIObjectStore,
    S3ObjectStore,
    build_remote_backend,
    get_file,
    maybe_create_object_store_from_uri,
    validate_credentials,
)
from hocket.compat.composer.utils.parallelism import FSDP2Config, ParallelismType
from hocket.compat.composer.utils.retrying import retry
from hocket.compat.composer.utils.small import (
    STR_TO_DTYPE,
    StringEnum,
    ensure_tuple,
    get_device,
    get_free_tcp_port,
    import_object,
    is_model_fsdp,
    map_collection,
    model_eval_mode,
    parse_uri,
)
from hocket.compat.composer.utils.small import is_model_fsdp as is_model_fsdp2
from hocket.compat.composer.utils.uploads import (
    RemoteFilesExistingCheckStatus,
    RemoteUploader,
    maybe_create_remote_uploader_downloader_from_uri,
)
from hocket.dist import FSDPConfig, ParallelismConfig
from hocket.trainer.errors import MissingExtraError as MissingConditionalImportError

__all__ = [
    "FORMAT_NAME_WITH_DIST_AND_TIME_TABLE",
    "FORMAT_NAME_WITH_DIST_TABLE",
    "KNOWN_COMPRESSORS",
    "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
    "MLFLOW_RUN_ID_FORMAT_KEY",
    "STR_TO_DTYPE",
    "CliCompressor",
    "CompressorNotFound",
    "ExportFormat",
    "FSDP2Config",
    "FSDPConfig",
    "GCSObjectStore",
    "IteratorFileStream",
    "MissingConditionalImportError",
    "OCIObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "ParallelismConfig",
    "ParallelismType",
    "PartialFilePath",
    "RemoteFilesExistingCheckStatus",
    "RemoteUploader",
    "S3ObjectStore",
    "StringEnum",
    "Transform",
    "VersionedDeprecationWarning",
    "add_vision_dataset_transform",
    "batch_get",
    "batch_set",
    "build_remote_backend",
    "configure_excepthook",
    "convert_flat_dict_to_nested_dict",
    "convert_nested_dict_to_flat_dict",
    "create_interval_scheduler",
    "create_symlink_file",
    "disable_env_report",
    "dist",
    "dist_checkpoint",
    "enable_env_report",
    "ensure_folder_has_no_conflicting_files",
    "ensure_folder_is_empty",
    "ensure_tuple",
    "export_for_inference",
    "export_with_logger",
    "extract_hparams",
    "extract_path_from_symlink",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_composer_env_dict",
    "get_compressor",
    "get_device",
    "get_file",
    "get_free_tcp_port",
    "get_save_filename",
    "glob_filter",
    "import_object",
    "is_compressed_pt",
    "is_hpu_installed",
    "is_model_fsdp",
    "is_model_fsdp2",
    "is_notebook",
    "is_tar",
    "is_xla_installed",
    "load_checkpoint",
    "map_collection",
    "maybe_create_object_store_from_uri",
    "maybe_create_remote_uploader_downloader_from_uri",
    "model_eval_mode",
    "module_surgery",
    "parse_uri",
    "partial_format",
    "print_env",
    "reproducibility",
    "retry",
    "safe_torch_load",
    "save_checkpoint",
    "validate_credentials",
]

__getattr__ = absent_from("composer.utils")
