//! `doctor` on machines with GPUs, against scripted libraries: what it says, at what width, and how it ends.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic, in its helpers too")]

#[path = "../scripted/mod.rs"]
mod scripted;

use scripted::{Library, Machine, cards, uuid};
use serde_json::Value;

/// What it prints, and what it says as JSON, with this value of CUDA_VISIBLE_DEVICES.
fn doctor(machine: &Machine, visible: Option<&str>) -> (String, Value) {
    let run = |arguments: &[&str]| {
        let mut command = machine.command(arguments);
        if let Some(visible) = visible {
            command.env("CUDA_VISIBLE_DEVICES", visible);
        }
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!complaints.contains("panicked"), "{complaints}");
        assert_eq!(
            output.status.code(),
            Some(if cfg!(feature = "engines") { 0 } else { 2 }),
            "{text}{complaints}"
        );
        text
    };
    let text = run(&["doctor"]);
    for line in text.lines() {
        // Paths and UUIDs are words that cannot be cut.
        let breakable = line.trim().contains(' ');
        assert!(
            line.chars().count() <= 80 || !breakable || line.contains('/'),
            "{} wide: {line}",
            line.len()
        );
    }
    assert!(!text.contains("1844674407") && !text.contains("4294967295"), "{text}");
    (text, serde_json::from_str(&run(&["doctor", "--json"])).unwrap())
}

/// The text as one line, however it was broken.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn machine(scenario: &str) -> Machine {
    let libraries: &[Library] = if cfg!(feature = "engines") {
        &[Library::Cuda, Library::Nvml, Library::Nccl]
    } else {
        &[Library::Cuda, Library::Nvml]
    };
    Machine::new(libraries, scenario)
}

#[test]
fn logical_cards_are_joined_to_physical_ones_by_uuid() {
    let machine = machine(&cards(4));
    let (text, json) = doctor(&machine, Some("3,1"));
    let text = flat(&text);
    assert!(
        text.contains(&format!(
            "cuda:0 = GPU 3, NVIDIA Scripted, 80.0 GiB, sm_90, 0000:13:00.0, {}",
            uuid(3)
        )),
        "{text}"
    );
    assert!(text.contains("cuda:1 = GPU 1,"), "{text}");
    assert_eq!(json["facts"]["gpus"]["cuda"]["cards"][0]["uuid"], uuid(3));
    assert_eq!(json["facts"]["driver"]["cards"].as_array().unwrap().len(), 4);
    assert_eq!(json["facts"]["gpus"]["visible"]["cut"], Value::Null);
    // Looking opens nothing.
    assert!(machine.log("cuda.log").is_empty());
}

// Field cases 082, 086.
#[test]
fn where_the_driver_stopped_reading_is_said() {
    let machine = machine(&cards(4));
    let (text, json) = doctor(&machine, Some("3,2,9,1"));
    assert!(
        flat(&text).contains(
            "CUDA_VISIBLE_DEVICES=3,2,9,1: entry 3 (`9`) is no card's number: what follows is not read"
        ),
        "{text}"
    );
    assert_eq!(json["facts"]["gpus"]["visible"]["devices"].as_array().unwrap().len(), 2);
    assert_eq!(json["facts"]["gpus"]["cuda"]["cards"].as_array().unwrap().len(), 2);
    let (text, _) = doctor(&machine, Some("GPU-0000"));
    assert!(flat(&text).contains("is the beginning of 4 cards' UUIDs: so no card is visible"), "{text}");
    assert!(text.contains("CUDA_ERROR_NO_DEVICE"), "{text}");
    let (text, _) = doctor(&machine, Some("-1"));
    assert!(flat(&text).contains("CUDA_VISIBLE_DEVICES=-1: entry 1 (`-1`) is no card's number"), "{text}");
    let (text, _) = doctor(&machine, Some("0,0"));
    assert!(flat(&text).contains("names a card again, which hides all cards"), "{text}");
}

#[test]
fn links_and_peer_access_are_shown_as_a_matrix() {
    let scenario = format!(
        "{}[cuda]\nno_peer = [[0, 2]]\n[nvml]\ntopology = [[0, 1, 10], [0, 2, 50], [1, 2, 40]]\nnvlinks = [[0, 1, 4]]\n",
        cards(3)
    );
    let (text, json) = doctor(&machine(&scenario), None);
    assert!(text.contains("cuda:0    X  NV4  SYS"), "{text}");
    assert!(text.contains("cuda:1  NV4    X NODE"), "{text}");
    assert!(flat(&text).contains("peer access not between 0-2"), "{text}");
    assert_eq!(json["facts"]["gpus"]["links"][2][1], "NODE");
    assert_eq!(json["facts"]["gpus"]["peers"][0][2], false);
    assert_eq!(json["facts"]["gpus"]["peers"][0][1], true);
}

#[test]
fn a_driver_that_fails_is_told_with_its_number_and_a_fix() {
    for (code, words, fix) in [
        (100, "CUDA_ERROR_NO_DEVICE", "check CUDA_VISIBLE_DEVICES"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
        (999, "CUDA_ERROR_UNKNOWN", "Xid"),
        (31337, "an error that this driver has no name for (CUDA error 31337)", "doctor"),
    ] {
        let scenario = format!("{}[cuda]\nfail = [{{ call = \"cuInit\", code = {code} }}]\n", cards(1));
        let (text, json) = doctor(&machine(&scenario), None);
        let text = flat(&text);
        assert!(text.contains(words) && text.contains(fix), "{code}: {text}");
        assert_eq!(json["facts"]["gpus"]["cuda"]["state"], "broken");
        assert_eq!(json["facts"]["gpus"]["cuda"]["code"], code);
    }
}

// Field case 088.
#[test]
fn an_updated_driver_is_told_as_what_it_is() {
    let (text, json) = doctor(&machine(&format!("{}[nvml]\ninit = \"error 18\"\n", cards(1))), None);
    assert!(
        flat(&text).contains("the driver was upgraded under the running kernel module: reboot"),
        "{text}"
    );
    assert_eq!(json["facts"]["driver"]["mismatch"], true);
}

// Field case 104: a guest that is told little.
#[test]
fn what_a_card_does_not_tell_is_a_gap() {
    let (_, json) = doctor(&machine(&cards(1)), None);
    let card = &json["facts"]["driver"]["cards"][0];
    for field in ["ecc", "uncorrected_errors", "persistence", "compute_mode", "throttle"] {
        assert_eq!(card[field], Value::Null, "{field}");
    }
}

#[test]
fn what_is_wrong_with_a_card_is_told_with_a_fix() {
    let sick = "processes = [{ pid = 4242, memory = 2000000000 }]\n[card.nvml]\necc_errors = 2\npersistence = 0\n\
        compute_mode = 3\nthrottle = 64\necc = 0\n";
    let (text, _) = doctor(&machine(&format!("{}{sick}", cards(1))), None);
    let text = flat(&text);
    for words in [
        "GPU 0: 2 memory errors that could not be corrected",
        "exclusive to one process",
        "slowed down now: hw_thermal",
        "persistence mode is off",
        "ECC is off",
        "1.9 GiB of it used by other processes (4242)",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

// Field case 080.
#[test]
fn slices_are_listed() {
    let scenario = format!("{}[[card.mig]]\nuuid = \"MIG-1\"\n[[card.mig]]\nuuid = \"MIG-2\"\n", cards(1));
    let (text, json) = doctor(&machine(&scenario), None);
    assert!(flat(&text).contains("GPU 0: MIG is on, 2 slices; CUDA shows one slice to a process"), "{text}");
    assert_eq!(json["facts"]["driver"]["cards"][0]["slices"], serde_json::json!(["MIG-1", "MIG-2"]));
}

#[test]
fn half_a_driver_is_told_by_the_half_that_is_missing() {
    let (text, _) = doctor(&Machine::new(&[Library::Nvml], &cards(1)), None);
    assert!(flat(&text).contains("libcuda.so.1 is not here, though NVML is"), "{text}");
    assert!(text.contains("--gpus all"), "{text}");
    let (text, json) = doctor(&Machine::new(&[Library::Cuda], &cards(2)), None);
    assert!(text.contains("cuda:1 = not among NVML's"), "{text}");
    assert_eq!(json["facts"]["gpus"]["links"], Value::Null);
    let (text, json) = doctor(&Machine::new(&[], ""), None);
    assert!(text.contains("virtual cards (CPU cores) are used"), "{text}");
    assert_eq!(json["facts"]["gpus"]["cuda"]["state"], "missing");
}

#[cfg(feature = "engines")]
#[test]
fn a_libtorch_for_cpus_on_a_gpu_machine_and_a_missing_nccl_are_said_aloud() {
    let (text, _) = doctor(&Machine::new(&[Library::Cuda, Library::Nvml], &cards(2)), None);
    let text = flat(&text);
    assert!(
        text.contains("cannot be used, this libtorch has no CUDA") && text.contains("./setup --full"),
        "{text}"
    );
    assert!(text.contains("NCCL not found: ddp cannot use these cards"), "{text}");
    let (text, _) = doctor(&machine(&cards(2)), None);
    assert!(flat(&text).contains("NCCL 2.28.9"), "{text}");
}
