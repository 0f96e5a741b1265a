//! src/card/cuda, called as a library.

use crate::scripted::{Library, Machine, cards, inside, uuid};
use dp_vs_ddp::card::cuda::{Context, Event, Stream, Timeline, Timing, driver};
use std::sync::Arc;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

fn machine(scenario: &str) -> Machine {
    Machine::new(&[Library::Cuda], &format!("{}{scenario}", cards(2)))
}

#[test]
fn cards_are_found_by_identity_without_opening_any() {
    if !inside("driver::cards_are_found_by_identity_without_opening_any", || machine("")) {
        return;
    }
    let driver = driver().unwrap();
    assert!(driver.scripted);
    assert_eq!(driver.cuda(), "13.0");
    let cards = driver.cards();
    assert_eq!(cards.len(), 2);
    assert_eq!((cards[1].ordinal, cards[1].uuid.as_str()), (1, uuid(1).as_str()));
    assert_eq!(cards[1].pci_bus_id.as_deref(), Some("0000:11:00.0"));
    assert_eq!((cards[0].memory_bytes, cards[0].compute_capability), (Some(80 << 30), Some((9, 0))));
    assert_eq!((driver.has_context(0), driver.has_context(1)), (Some(false), Some(false)));
    assert_eq!(driver.can_access_peer(0, 1), Some(true));
    assert_eq!(driver.can_access_peer(0, 7), None);
}

#[test]
fn a_driver_that_fails_is_told_in_its_own_words() {
    let scenario = "[cuda]\nfail = [{ call = \"cuInit\", code = 803 }]\n";
    if !inside("driver::a_driver_that_fails_is_told_in_its_own_words", || machine(scenario)) {
        return;
    }
    let fault = driver().unwrap_err();
    assert_eq!((fault.call, fault.code), ("cuInit", Some(803)));
    assert!(fault.reason.contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, system has unsupported"), "{fault}");
}

// A newer driver's error has no name here, and must not be taken for another one.
#[test]
fn an_error_that_nobody_knows_keeps_its_number() {
    let scenario = "[cuda]\nfail = [{ call = \"cuInit\", code = 31337 }]\n";
    if !inside("driver::an_error_that_nobody_knows_keeps_its_number", || machine(scenario)) {
        return;
    }
    assert_eq!(
        driver().unwrap_err().to_string(),
        "cuInit failed: an error that this driver has no name for (CUDA error 31337)"
    );
}

#[test]
fn copies_between_cards_wait_for_the_events_they_are_told_to() {
    if !inside("driver::copies_between_cards_wait_for_the_events_they_are_told_to", || machine("")) {
        return;
    }
    let (first, second) = (Context::open(0).unwrap(), Context::open(1).unwrap());
    assert!(second.enable_peer(&first).unwrap() && second.enable_peer(&first).unwrap());
    let (from, to) = (Stream::urgent(&first).unwrap(), Stream::urgent(&second).unwrap());
    let source: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    let (mut middle, mut target) = (vec![0u8; 1 << 20], vec![0u8; 1 << 20]);
    let ready = Event::new(&first, Timing::No).unwrap();
    for _ in 0..20 {
        middle.fill(0);
        target.fill(0);
        // SAFETY: all three outlive the synchronisation below.
        unsafe {
            from.copy_from(middle.as_mut_ptr(), &first, source.as_ptr(), source.len()).unwrap();
            from.record(&ready).unwrap();
            to.wait(&ready).unwrap();
            to.copy_from(target.as_mut_ptr(), &first, middle.as_ptr(), middle.len()).unwrap();
        }
        to.synchronize(10 * SECOND).unwrap();
        assert!(target == source);
    }
}

#[test]
fn a_timeline_puts_the_cards_time_on_the_hosts_clock() {
    if !inside("driver::a_timeline_puts_the_cards_time_on_the_hosts_clock", || machine("")) {
        return;
    }
    let context = Context::open(0).unwrap();
    let mut timeline = Timeline::new(Arc::new(Stream::default_of(&context)));
    timeline.anchor().unwrap();
    let before = dp_vs_ddp::units::Nanos::now();
    let start = timeline.mark().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let end = timeline.mark().unwrap();
    let after = dp_vs_ddp::units::Nanos::now();
    let interval = start.until(&end).unwrap().unwrap();
    // The two clocks are tied as well as a busy host allows.
    let slack = 50_000_000;
    assert!(interval.start.0 + slack >= before.0 && interval.end.0 <= after.0 + slack, "{interval:?}");
    assert!(interval.end.since(interval.start).as_ms() >= 19.9, "{interval:?}");
}

#[test]
fn a_stream_that_hangs_is_left_at_the_deadline_and_an_unreached_mark_has_no_time() {
    if !inside(
        "driver::a_stream_that_hangs_is_left_at_the_deadline_and_an_unreached_mark_has_no_time",
        || machine(""),
    ) {
        return;
    }
    let context = Context::open(0).unwrap();
    let (blocked, blocking) = (Stream::urgent(&context).unwrap(), Stream::urgent(&context).unwrap());
    let mut timeline = Timeline::new(Arc::new(blocked));
    let start = timeline.mark().unwrap();
    // A large copy that takes a while, and a stream behind it.
    let (source, mut target) = (vec![1u8; 256 << 20], vec![0u8; 256 << 20]);
    let copied = Event::new(&context, Timing::No).unwrap();
    // SAFETY: both outlive the synchronisation below.
    unsafe {
        blocking.copy_from(target.as_mut_ptr(), &context, source.as_ptr(), source.len()).unwrap();
    }
    blocking.record(&copied).unwrap();
    timeline.stream().wait(&copied).unwrap();
    let end = timeline.mark().unwrap();
    let error = timeline.stream().synchronize(Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), dp_vs_ddp::error::Kind::Timeout);
    assert!(error.to_string().starts_with("cuda:0: the card has not finished its work in"), "{error}");
    assert_eq!(start.until(&end).unwrap(), None);
    timeline.stream().synchronize(60 * SECOND).unwrap();
    assert!(start.until(&end).unwrap().is_some());
}

#[test]
fn an_error_of_the_cards_work_comes_out_where_it_is_waited_for() {
    let scenario = "[cuda]\nfail = [{ call = \"cuEventQuery\", at = 3, code = 700 }]\n";
    if !inside("driver::an_error_of_the_cards_work_comes_out_where_it_is_waited_for", || machine(scenario)) {
        return;
    }
    let stream = Stream::urgent(&Context::open(0).unwrap()).unwrap();
    let event = Event::new(stream.context(), Timing::No).unwrap();
    assert!(event.is_reached().unwrap() && event.is_reached().unwrap());
    let error = event.is_reached().unwrap_err();
    assert!(
        error.to_string().starts_with("cuda:0: cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{error}"
    );
}

#[test]
fn the_default_stream_is_that_of_its_own_card_whoever_calls() {
    if !inside("driver::the_default_stream_is_that_of_its_own_card_whoever_calls", || machine("")) {
        return;
    }
    let (first, second) = (Context::open(0).unwrap(), Context::open(1).unwrap());
    // The second is current now; the scripted driver refuses events of another card than the stream's.
    let event = Event::new(&first, Timing::Yes).unwrap();
    Stream::default_of(&first).record(&event).unwrap();
    let theirs = Event::new(&second, Timing::Yes).unwrap();
    assert!(Stream::default_of(&first).record(&theirs).is_err());
    assert!(theirs.since(&event).is_err());
}
