//! Files and folders of other programs that are not read here: their names, and the way to a form that is read.

/// The file that DeepSpeed writes beside its folders, and the suffixes of those in them.
const DEEPSPEED_SCRIPT: &str = "zero_to_fp32.py";
const DEEPSPEED_SUFFIXES: [&str; 2] = ["_model_states.pt", "_optim_states.pt"];

const DEEPSPEED: &str = "it is a checkpoint of DeepSpeed, whose files hold the parts of the ranks: join them with its script, \
    `python zero_to_fp32.py FOLDER OUT`, and name the result. Without ZeRO, or with its stages 1 and 2, \
    `mp_rank_00_model_states.pt` holds the whole model and can be named itself";
const MEGATRON: &str = "it is a checkpoint of Megatron, whose files hold the parts of the ranks: convert it with Megatron's \
    own tools to Hugging Face's format, or save it with `--ckpt-format torch_dist`";
const UNFINISHED: &str = "it has the `.distcp` files of a distributed checkpoint of torch without its `.metadata`, which is written \
    last: the save did not finish, or the file was not copied";
const EXPORTED: &str = "it is a program of `torch.export`, not a file of `torch.save`: load it with `torch.export.load`, and save its \
    `state_dict` with `torch.save` or as safetensors";
const SCRIPTED: &str = "it is a program of TorchScript, not a file of `torch.save`: load it with `torch.jit.load`, and save its \
    `state_dict()` with `torch.save` or as safetensors";
const LEGACY: &str = "it is in the form that torch.save had before torch 1.6, without a zip; load and save it once with torch";
const PICKLE: &str = "it is a plain pickle, which `torch.save` did not write; load it with the program that wrote it, and save it \
    with `torch.save` or as safetensors";
pub(super) const POINTER: &str =
    "it is a pointer of Git LFS, not the file itself: fetch the file with `git lfs pull`";

/// The bytes by which the old form of `torch.save` starts, as an integer of a binary and of a text pickle.
const MAGIC: [&[u8]; 2] = [
    b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19",
    b"L119547037146038801333356L",
];

/// Number of bytes of a file that [`file`] looks at.
pub(super) const START_BYTES: u64 = 48;

/// Names a folder by its files and folders, if its form is known.
pub(super) fn folder(files: &[String], folders: &[String]) -> Option<&'static str> {
    let has = |name: &str| files.iter().any(|one| one == name);
    let is_part = |name: &String| {
        DEEPSPEED_SUFFIXES
            .iter()
            .any(|suffix| name.ends_with(suffix))
    };
    let has_steps = folders
        .iter()
        .any(|name| name.trim_end_matches('/').contains("global_step"));
    if has(DEEPSPEED_SCRIPT) || files.iter().any(is_part) || (has("latest") && has_steps) {
        return Some(DEEPSPEED);
    }
    if has("latest_checkpointed_iteration.txt")
        || folders.iter().any(|name| name.starts_with("mp_rank_"))
    {
        return Some(MEGATRON);
    }
    (files.iter().any(|name| name.ends_with(".distcp"))).then_some(UNFINISHED)
}

/// Names a file by its name and its first bytes, if its form is known.
pub(super) fn file(name: &str, start: &[u8]) -> Option<&'static str> {
    let is_legacy = MAGIC
        .iter()
        .any(|magic| start.windows(magic.len()).any(|part| part == *magic));
    match start {
        _ if name.contains("zero_pp_rank_") => Some(DEEPSPEED),
        _ if is_legacy => Some(LEGACY),
        _ if is_pointer(start) => Some(POINTER),
        [0x80, 2..=5, ..] => Some(PICKLE),
        _ => None,
    }
}

/// Returns whether a file starts as a pointer of Git LFS, whose first line is its specification's address.
pub(super) fn is_pointer(start: &[u8]) -> bool {
    start.starts_with(b"version ")
}

/// Names a zip by its members, if a program of torch is in it.
pub(super) fn zip<'a>(mut members: impl Iterator<Item = &'a str> + Clone) -> Option<&'static str> {
    let mut named = members.clone();
    if members.any(|name| {
        name.ends_with("archive_format") || name.ends_with("serialized_exported_program.json")
    }) {
        return Some(EXPORTED);
    }
    named
        .any(|name| name.ends_with("/constants.pkl"))
        .then_some(SCRIPTED)
}
