use super::*;
use crate::comm::Collective;
use tch::Tensor;

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `work` as every rank, each on its own thread; results by rank.
fn ranks<T: Send>(world_size: usize, deadline: Duration, work: impl Fn(Shm) -> T + Sync) -> Vec<T> {
    let group = Shm::threads(world_size, deadline).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = group.into_iter().map(|shm| scope.spawn(|| work(shm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor).unwrap()
}

#[test]
fn all_reduce_sums_over_any_number_of_ranks_and_lengths() {
    for world_size in [1, 2, 3, 4, 8] {
        let sums = ranks(world_size, PATIENCE, |mut shm| {
            [0, 1, 63, 64, 65, 5000].map(|len| {
                let mut buffer = shm.allocate(len, Kind::Float).unwrap();
                let _ = buffer.tensor.f_fill_(f64::from(shm.rank() as u32 + 1)).unwrap();
                shm.all_reduce(&buffer).unwrap();
                values(&buffer.tensor)
            })
        });
        let expected = (world_size * (world_size + 1) / 2) as f32;
        for lengths in &sums {
            assert!(lengths.iter().flatten().all(|sum| *sum == expected), "{world_size} ranks");
            assert_eq!(lengths[5].len(), 5000);
        }
    }
}

#[test]
fn all_ranks_get_the_same_bits_whatever_rounding_does() {
    let sums = ranks(4, PATIENCE, |mut shm| {
        let mut buffer = shm.allocate(10_000, Kind::Float).unwrap();
        let generator =
            (0..10_000u32).map(|i| ((i * 2_654_435_761 + shm.rank() as u32 * 97) as f32).sqrt() / 3.0);
        buffer.tensor.f_copy_(&Tensor::from_slice(&generator.collect::<Vec<_>>())).unwrap();
        shm.all_reduce(&buffer).unwrap();
        values(&buffer.tensor).into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
    assert!(sums.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn broadcast_spreads_the_root_s_bytes_alone() {
    let got = ranks(3, PATIENCE, |mut shm| {
        let mut buffer = shm.allocate(100, Kind::Bool).unwrap();
        let _ = buffer.tensor.f_fill_(i64::from(shm.rank() == 2)).unwrap();
        shm.broadcast(&buffer, 2).unwrap();
        buffer.tensor.to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[])
    });
    assert_eq!(got, [100, 100, 100]);
}

#[test]
fn messages_of_any_length_are_exchanged_in_rank_order() {
    let got = ranks(3, PATIENCE, |mut shm| {
        let mut all = Vec::new();
        for round in 0..50usize {
            let len = [0, 1, MESSAGE, MESSAGE + 1, 3 * MESSAGE + 5][(round + shm.rank()) % 5];
            let answers = shm.exchange(&vec![(round + shm.rank()) as u8; len]).unwrap();
            all.push(
                answers.into_iter().map(|bytes| (bytes.len(), bytes.last().copied())).collect::<Vec<_>>(),
            );
        }
        all
    });
    assert!(got.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(got[0][3], [(MESSAGE + 1, Some(3)), (3 * MESSAGE + 5, Some(4)), (0, None)]);
}

/// Case 062: a stalled rank is named, with the collective it is missed at, well before anybody gives up.
#[test]
fn a_late_rank_is_named_with_the_number_of_the_collective() {
    let errors = ranks(3, Duration::from_millis(300), |mut shm| {
        shm.barrier().unwrap();
        if shm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(900));
        }
        let error = shm.barrier().unwrap_err();
        // After an error all further calls fail with the first reason, at once.
        let start = std::time::Instant::now();
        assert_eq!(shm.exchange(b"x").unwrap_err().to_string(), error.to_string());
        assert!(start.elapsed() < Duration::from_millis(200));
        error
    });
    for error in &errors {
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let text = error.to_string();
        assert!(text.starts_with("rank 1 (process "), "{text}");
        assert!(
            text.contains("last seen at collective 1) had not arrived at collective 2 (barrier) after 0.3 s"),
            "{text}"
        );
    }
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let member = Member { rank: 0, world_size: 2, deadline: Duration::from_millis(50), meter: None };
    let text = Shm::connect(member, &Board::new(PATIENCE)).unwrap_err().to_string();
    assert!(
        text.starts_with("rank 1 (never joined) had not arrived at collective 0 (join) after "),
        "{text}"
    );
}

#[test]
fn different_calls_are_an_error_on_every_rank() {
    let check = |first: fn(&mut Shm) -> Result<()>, second: fn(&mut Shm) -> Result<()>, expected: &str| {
        let errors =
            ranks(2, PATIENCE, |mut shm| if shm.rank() == 0 { first(&mut shm) } else { second(&mut shm) });
        for error in errors {
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
    };
    check(
        |shm| shm.allocate(100, Kind::Float).map(drop),
        |shm| shm.allocate(101, Kind::Float).map(drop),
        "ranks disagree at collective 1: rank 0 calls allocate of 100 Float, rank 1 calls allocate of 101 Float",
    );
    check(
        Shm::barrier,
        |shm| shm.exchange(b"").map(drop),
        "ranks disagree at collective 1: rank 0 calls barrier, rank 1 calls exchange",
    );
    let reduce_second = |shm: &mut Shm| {
        let buffers = [shm.allocate(8, Kind::Float)?, shm.allocate(8, Kind::Float)?];
        shm.all_reduce(&buffers[shm.rank()])
    };
    check(
        reduce_second,
        reduce_second,
        "ranks disagree at collective 3: rank 0 calls all_reduce of 8 Float (buffer 0), \
         rank 1 calls all_reduce of 8 Float (buffer 1)",
    );
}

#[test]
fn an_abort_wakes_everybody_with_its_reason() {
    let start = std::time::Instant::now();
    let errors = ranks(3, PATIENCE, |mut shm| {
        if shm.rank() == 2 {
            let abort = shm.abort_handle();
            std::thread::sleep(Duration::from_millis(50));
            abort.raise("the loss is not a number");
        }
        shm.barrier().unwrap_err().to_string()
    });
    assert_eq!(errors[0], "stopped by rank 2: the loss is not a number");
    assert_eq!(errors[2], "the loss is not a number");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_leaves_is_noticed_long_before_the_deadline() {
    let start = std::time::Instant::now();
    let errors = ranks(2, Duration::from_secs(60), |mut shm| {
        shm.barrier().unwrap();
        if shm.rank() == 0 { shm.barrier().unwrap_err().to_string() } else { String::new() }
    });
    assert!(errors[0].starts_with("rank 1 (process "), "{}", errors[0]);
    assert!(errors[0].ends_with("has left before collective 2: barrier"), "{}", errors[0]);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_rank_number_is_given_once_and_must_exist() {
    let board = Board::new(PATIENCE);
    let member = |rank| Member { rank, world_size: 2, deadline: PATIENCE, meter: None };
    let _first = Shm::enter(member(0), &board).unwrap();
    let _second = Shm::enter(member(1), &board).unwrap();
    let error = Shm::enter(member(1), &board).unwrap_err();
    assert!(error.to_string().starts_with("rank 1 is taken by process "), "{error}");
    assert!(Shm::enter(member(2), &board).is_err());
    let other = Member { rank: 1, world_size: 3, deadline: PATIENCE, meter: None };
    let error = Shm::enter(other, &board).unwrap_err();
    assert!(error.to_string().ends_with("is for 2 ranks, this rank was told 3"), "{error}");
}

#[test]
fn a_type_that_cannot_be_summed_is_refused_without_disturbing_the_group() {
    let errors = ranks(2, PATIENCE, |mut shm| {
        let flags = shm.allocate(4, Kind::Bool).unwrap();
        let error = shm.all_reduce(&flags).unwrap_err().to_string();
        shm.barrier().unwrap();
        error
    });
    assert_eq!(errors[0], "cannot sum Bool over ranks");
}

#[test]
fn buffers_and_waits_are_charged_to_the_card() {
    let meter = Arc::new(Meter::create(2).unwrap());
    let board = Board::new(PATIENCE);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (meter, board) = (Arc::clone(&meter), board.clone());
            scope.spawn(move || {
                let member = Member {
                    rank,
                    world_size: 2,
                    deadline: PATIENCE,
                    meter: Some((Arc::clone(&meter), rank)),
                };
                let mut shm = Shm::connect(member, &board).unwrap();
                let buffer = shm.allocate(1000, Kind::Float).unwrap();
                assert_eq!(meter.card(rank).live_bytes.load(Relaxed), 4000);
                if rank == 1 {
                    std::thread::sleep(Duration::from_millis(60));
                }
                shm.all_reduce(&buffer).unwrap();
            });
        }
    });
    let waited = Nanos(meter.card(0).wait_wall_ns.load(Relaxed));
    assert!(waited.as_ms() > 40.0, "{waited:?}");
    assert_eq!(meter.card(0).live_bytes.load(Relaxed), 0);
    assert_eq!(meter.card(0).peak_bytes.load(Relaxed), 4000);
}

#[test]
fn a_thousand_reductions_on_more_ranks_than_cores_stay_right() {
    let oks = ranks(8, PATIENCE, |mut shm| {
        let mut buffer = shm.allocate(777, Kind::Float).unwrap();
        (0..1000).all(|round| {
            let _ = buffer.tensor.f_fill_(f64::from(round % 7 + shm.rank() as i32)).unwrap();
            shm.all_reduce(&buffer).unwrap();
            let expected = (8 * (round % 7) + 28) as f32;
            values(&buffer.tensor).into_iter().all(|sum| sum == expected)
        })
    });
    assert!(oks.into_iter().all(|ok| ok));
}
