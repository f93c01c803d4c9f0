#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

fn refused(input: &[u8], allowed: AllowedGlobals) -> PickleFault {
    decode(input, allowed).expect_err("it was read")
}

fn json(input: &[u8]) -> serde_json::Value {
    let pickle = decode(input, AllowedGlobals::TorchSave).unwrap();
    to_json(&pickle, pickle.root, &mut 1_000_000).unwrap()
}

#[test]
fn plain_values_are_converted_to_tagged_json() {
    // {'a': (1, -2, 2**80), 'b': [True, None], 'c': inf} in protocol 2.
    let mut input = b"\x80\x02}q\x00(X\x01\x00\x00\x00aK\x01J\xfe\xff\xff\xff\x8a\x0b".to_vec();
    input.extend([0; 10]);
    input.extend(
        b"\x01\x87q\x01X\x01\x00\x00\x00b](\x88NeX\x01\x00\x00\x00cG\x7f\xf0\0\0\0\0\0\0u.",
    );
    let expected = serde_json::json!({
        "a": {"$tuple": [1, -2, {"$int": "1208925819614629174706176"}]},
        "b": [true, null],
        "c": {"$float": "inf"},
    });
    assert_eq!(json(&input), expected);
}

#[test]
fn a_negative_long_keeps_its_sign() {
    let mut input = b"\x80\x02\x8a\x0a".to_vec();
    input.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, b'.']);
    assert_eq!(
        json(&input),
        serde_json::json!({"$int": "-604462909807314587353088"})
    );
}

#[test]
fn names_outside_the_list_are_refused_in_metadata_and_opaque_in_files_of_torch_save() {
    let calls: [&[u8]; 4] = [
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x02ctorch.hub\nload\n.",
    ];
    for (input, name) in calls.iter().zip([
        "os.system",
        "posix.system",
        "builtins.eval",
        "torch.hub.load",
    ]) {
        let PickleFault::Unsafe(reason) = refused(input, AllowedGlobals::Metadata) else {
            panic!("{name} is no mere defect");
        };
        assert!(reason.contains(&format!("`{name}`")), "{reason}");
        let pickle = decode(input, AllowedGlobals::TorchSave).unwrap();
        let PickleFault::Unfit(reason) = to_json(&pickle, pickle.root, &mut 100).unwrap_err()
        else {
            panic!("{name} has a form");
        };
        assert!(reason.contains(name), "{reason}");
    }
}

#[test]
fn subclasses_of_containers_are_read_as_plain_containers() {
    // A subclass of dict with {'a': 1}, a subclass of list with [2], a deque([3], maxlen=4), a defaultdict.
    let inputs: [(&[u8], serde_json::Value); 4] = [
        (b"\x80\x02cmine\nDict\n)\x81X\x01\x00\x00\x00aK\x01s}b.", serde_json::json!({"a": 1})),
        (b"\x80\x02cmine\nList\n)\x81K\x02a.", serde_json::json!([2])),
        (b"\x80\x02ccollections\ndeque\n]K\x03aK\x04\x86R.", serde_json::json!([3])),
        (
            b"\x80\x02ccollections\ndefaultdict\nc__builtin__\nlist\n\x85RX\x01\x00\x00\x00aK\x01s.",
            serde_json::json!({"a": 1}),
        ),
    ];
    for (input, expected) in inputs {
        assert_eq!(json(input), expected);
    }
}

#[test]
fn other_opcodes_that_build_objects_or_look_up_names_are_refused() {
    let inputs: [&[u8]; 5] = [
        b"\x80\x02(X\x02\x00\x00\x00idios\nsystem\n.",
        b"\x80\x02(cos\nsystem\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02\x84\x01\x00\x00\x00.",
        b"Pnumber\n.",
    ];
    for input in inputs {
        assert!(matches!(
            refused(input, AllowedGlobals::TorchSave),
            PickleFault::Unsafe(_)
        ));
    }
    // A persistent id is a storage in a file of torch.save, and invalid in a `.metadata`.
    assert!(decode(b"\x80\x02K\x01Q.", AllowedGlobals::TorchSave).is_ok());
    assert!(matches!(
        refused(b"\x80\x02K\x01Q.", AllowedGlobals::Metadata),
        PickleFault::Unsafe(_)
    ));
}

#[test]
fn a_dtype_is_not_called() {
    assert!(matches!(
        refused(b"\x80\x02ctorch\nfloat32\n)R.", AllowedGlobals::TorchSave),
        PickleFault::Unsafe(_)
    ));
}

/// Returns the CPU time of this thread, which excludes other work on the machine.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call fills a structure owned by this function.
    let outcome = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(outcome, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[test]
fn pickle_bombs_are_refused_within_a_second() {
    let mut began = cpu_seconds();
    let mut in_time = || {
        let spent = cpu_seconds() - began;
        assert!(spent < 1.0, "{spent} s");
        began += spent;
    };
    // A text with a declared length of 4 GiB that is missing.
    assert!(
        decode(
            b"\x80\x04\x8d\x00\x00\x00\x00\x01\x00\x00\x00abc.",
            AllowedGlobals::Metadata
        )
        .is_err()
    );
    in_time();
    // Nested lists, a million levels deep.
    let mut deep = b"\x80\x02".to_vec();
    deep.extend(std::iter::repeat_n(b']', 1_000_000));
    deep.extend(std::iter::repeat_n(b'a', 999_999));
    deep.push(b'.');
    let pickle = decode(&deep, AllowedGlobals::TorchSave).unwrap();
    assert!(to_json(&pickle, pickle.root, &mut 300_000).is_err());
    in_time();
    // A billion laughs: thirty lists, each with ten copies of the previous one.
    let mut laughs = b"\x80\x02]q\x00".to_vec();
    for level in 0..30_u8 {
        laughs.extend(b"](");
        for _ in 0..10 {
            laughs.extend([b'h', level]);
        }
        laughs.extend([b'e', b'q', level + 1]);
    }
    laughs.push(b'.');
    let pickle = decode(&laughs, AllowedGlobals::TorchSave).unwrap();
    assert!(to_json(&pickle, pickle.root, &mut 300_000).is_err());
    in_time();
    // A list that contains itself.
    let pickle = decode(b"\x80\x02]q\x00h\x00a.", AllowedGlobals::TorchSave).unwrap();
    assert!(to_json(&pickle, pickle.root, &mut 300_000).is_err());
    in_time();
    // More values than the size of the pickle allows.
    let many = [b"\x80\x02".as_slice(), &vec![b'N'; 8_000_000], b"."].concat();
    assert!(decode(&many, AllowedGlobals::TorchSave).is_err());
    in_time();
}

/// Opcodes of torch's pickles, so that random programs get past their first byte.
const OPCODES: &[u8] =
    b"N\x88\x89KMJ\x8aGX\x8cCB])}\x8f\x85\x86\x87tl(d0ae\x90suhjqr\x94cR\x81bQP.\x93\x80\x95";

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(input in prop::collection::vec(any::<u8>(), 0..400)) {
        for allowed in [AllowedGlobals::Metadata, AllowedGlobals::TorchSave] {
            if let Ok(pickle) = decode(&input, allowed) {
                let _ = to_json(&pickle, pickle.root, &mut 10_000);
            }
        }
    }

    #[test]
    fn any_program_is_read_or_refused(
        program in prop::collection::vec((prop::sample::select(OPCODES), prop::collection::vec(0_u8..4, 0..3)), 0..200),
    ) {
        let mut input: Vec<u8> = program.into_iter().flat_map(|(opcode, rest)| std::iter::once(opcode).chain(rest)).collect();
        input.push(b'.');
        for allowed in [AllowedGlobals::Metadata, AllowedGlobals::TorchSave] {
            if let Ok(pickle) = decode(&input, allowed) {
                let _ = to_json(&pickle, pickle.root, &mut 10_000);
            }
        }
    }
}
