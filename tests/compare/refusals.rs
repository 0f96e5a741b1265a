//! What cannot be run is refused with status 2, names the flag, key or path, gives a hint, and leaves
//! nothing behind.

use crate::support::*;
use std::process::Command;

/// Refused, with these words, before a run folder was made.
fn assert_refused(runs: &Runs, args: &[&str], words: &[&str]) {
    let output = program(&["compare", "--out", runs.out()]).args(args).output().unwrap();
    let text = stderr(&output);
    assert_eq!(exit(&output), 2, "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?}: `{word}` is not in: {text}");
    }
    assert_eq!(stdout(&output), "", "{args:?}");
    assert!(runs.entries().is_empty(), "{args:?} left {:?}", runs.entries());
}

#[test]
fn bad_values_name_what_they_were_given_for() {
    let runs = Runs::new();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--no-such-flag"], &["--no-such-flag"]),
        (&["--cards", "0"], &["run.cards", "0", "hint: "]),
        (&["--cards", "-1"], &["run.cards", "-1", "hint: "]),
        (&["--cards", "two"], &["run.cards", "two", "hint: "]),
        (&["--cards", "99999999999999999999"], &["run.cards", "hint: "]),
        (&["--cards", "100000"], &["run.cards", "hint: "]),
        (&["--steps", "0"], &["run.steps", "hint: "]),
        (&["--rounds", "1e9"], &["run.rounds", "hint: "]),
        (&["--engines", ""], &["run.engines", "hint: "]),
        (&["--engines", "single,warp"], &["warp", "hint: "]),
        (&["--model", "alexnet"], &["alexnet", "hint: "]),
        (&["--set", "run.stepz=3"], &["run.stepz", "run.steps", "hint: "]),
        (&["--set", "optimizer.lr=nan"], &["optimizer.lr", "hint: "]),
        (&["--set", "nonsense"], &["nonsense", "hint: "]),
        (&["--batch", "7", "--cards", "2"], &["batch.global", "7", "6 or 8", "hint: "]),
        (&["--batch", "8", "--batch-per-card", "4"], &["batch.global", "batch.per_card", "hint: "]),
        (&["--batch-per-card", "1000000"], &["batch", "hint: "]),
        (&["--model", "gpt", "--data", "digits"], &["gpt", "tokens", "hint: "]),
        (&["--device", "cuda"], &["cuda", "--device cpu", "hint: "]),
        (&["--run-id", "../elsewhere"], &["--run-id", "../elsewhere", "hint: "]),
        (&["--run-id", "latest"], &["--run-id", "latest", "hint: "]),
        (&["--init", "/no/such/weights"], &["--init", "/no/such/weights", "hint: "]),
        (&["--init", "/"], &["--init", "`/`"]),
        (&["--grace", "-1"], &["--grace"]),
        (&["no-such-config"], &["no-such-config", "quick", "hint: "]),
        (&["/"], &["`/`", "hint: "]),
    ];
    for (args, words) in cases {
        assert_refused(&runs, args, words);
    }
}

#[test]
fn a_config_with_a_mistake_names_file_line_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    for (text, words) in [
        ("[run]\nsteps = \"many\"\n", ["mine.toml", "run.steps", "many"]),
        ("[run]\nspeed = 9\n", ["mine.toml", "speed", "hint: "]),
        ("[run\n", ["mine.toml", "1", "hint: "]),
        ("\u{0}\u{1}", ["mine.toml", "1", "hint: "]),
    ] {
        std::fs::write(&file, text).unwrap();
        assert_refused(&Runs::new(), &[file.to_str().unwrap()], &words);
    }
    std::fs::write(&file, [0xff, 0xfe, 0x00]).unwrap();
    assert_refused(&Runs::new(), &[file.to_str().unwrap()], &["mine.toml"]);
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [&["--help"][..], &["--version"], &["compare", "--help"], &["train", "--help"]] {
        let output = run(args);
        assert_eq!((exit(&output), stderr(&output)), (0, String::new()), "{args:?}");
        assert!(!stdout(&output).is_empty());
    }
    assert!(stdout(&run(&["compare", "--help"])).contains("Exit status: 0 done, 1 judged and failed"));
    assert!(!stdout(&run(&["--help"])).contains("worker"), "started by the program, not by people");
    assert_eq!(exit(&run(&[])), 2);
}

#[test]
fn a_run_is_never_overwritten() {
    let runs = Runs::new();
    std::fs::create_dir(runs.path("mine")).unwrap();
    std::fs::write(runs.path("mine").join("results.json"), "precious").unwrap();
    let output = runs.compare("mine", &SHORT).output().unwrap();
    assert_eq!(exit(&output), 2);
    assert!(stderr(&output).contains("exists already"), "{}", stderr(&output));
    assert!(stderr(&output).contains("--run-id"));
    assert_eq!(std::fs::read_to_string(runs.path("mine").join("results.json")).unwrap(), "precious");
    assert_eq!(entries(&runs.path("mine")), ["results.json"]);
}

#[test]
fn an_output_folder_that_cannot_be_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for out in [file.to_str().unwrap(), "/proc/nothing/here"] {
        let output = run(&["compare", "--data", "digits", "--out", out]);
        assert_eq!(exit(&output), 2);
        assert!(stderr(&output).contains(out), "{}", stderr(&output));
    }
}

/// Runs a shell script in a mount namespace of its own with a small file system at `$1`, the program at
/// `$2`. `None` where this machine does not allow that, which is said.
fn with_mount(options: &str, script: &str) -> Option<std::process::Output> {
    let folder = tempfile::tempdir().unwrap();
    let mounted = format!("mount -t tmpfs -o {options} none \"$1\" || exit 77; {script}");
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &mounted, "sh"])
        .arg(folder.path())
        .arg(env!("CARGO_BIN_EXE_dp-vs-ddp"))
        .output();
    match output {
        Ok(output) if output.status.code() != Some(77) && !stderr(&output).starts_with("unshare:") => {
            Some(output)
        }
        _ => {
            eprintln!("skipped: no mounts of one's own here (unshare)");
            None
        }
    }
}

const TINY: &str = "--data digits --set model.hidden=32 --batch-per-card 8 --cards 2 --warmup 1 --steps 5";

#[test]
fn a_read_only_folder_is_found_out_before_anything_runs() {
    let script =
        format!("mount -o remount,ro none \"$1\"; \"$2\" compare {TINY} --out \"$1\"; echo $?; ls -A \"$1\"");
    let Some(output) = with_mount("size=1m", &script) else { return };
    assert_eq!(stdout(&output).trim(), "2", "{}", stderr(&output));
    assert!(stderr(&output).contains("Read-only file system"), "{}", stderr(&output));
    assert!(stderr(&output).contains("hint: choose a writable folder with --out"));
}

#[test]
fn a_full_disk_is_found_out_before_anything_runs() {
    let script = format!(
        "dd if=/dev/zero of=\"$1\"/ballast bs=4k 2>/dev/null; \"$2\" compare {TINY} --out \"$1\"; echo $?; ls -A \"$1\""
    );
    let Some(output) = with_mount("size=64k", &script) else { return };
    assert_eq!(stdout(&output).lines().collect::<Vec<_>>(), ["2", "ballast"], "{}", stderr(&output));
    assert!(stderr(&output).contains("No space left"), "{}", stderr(&output));
    assert!(stderr(&output).contains("hint: free some space, or choose another folder with --out"));
}

#[test]
fn a_disk_that_fills_in_mid_run_keeps_the_finished_rounds() {
    let script = format!(
        "\"$2\" compare {TINY} --rounds 500 --engines single,dp --set sample.period_ms=20 --out \"$1\" --run-id r; echo $?; cat \"$1\"/r/results.json"
    );
    let Some(output) = with_mount("size=160k", &script) else { return };
    let text = stdout(&output);
    let (status, results) = text.split_once('\n').unwrap();
    assert_eq!(status, "2", "{}", stderr(&output));
    assert!(stderr(&output).contains("No space left"), "{}", stderr(&output));
    let results: serde_json::Value = serde_json::from_str(results).unwrap();
    assert!(rounds(&results) > 0);
    assert_ne!(results["status"], "complete");
}

#[test]
fn weights_that_no_engine_could_start_from_are_refused_before_anything_is_written() {
    let runs = Runs::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    let init = path.to_str().unwrap();
    let refused = |words: &str| {
        let output = runs.compare("init", &SHORT).args(["--init", init]).output().unwrap();
        let text = stderr(&output);
        assert_eq!(exit(&output), 2, "{text}");
        assert!(text.contains("--init") && text.contains(words) && text.contains("hint: "), "{text}");
        assert!(runs.entries().is_empty());
    };
    std::fs::write(&path, "not weights").unwrap();
    refused("not a safetensors file");
    // The weights of another model.
    let train = ["train", "--engine", "single", "--epochs", "1", "--data", "digits", "--save", init];
    assert_eq!(exit(&program(&train).args(["--set", "model.hidden=16"]).output().unwrap()), 0);
    refused("has shape");
    // One value that is not a number, in the place of the last.
    let mut bytes = std::fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    refused("not finite");
}
