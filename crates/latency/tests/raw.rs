//! The raw loops, between two threads that map one field each for itself.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
};

use teeline_latency::raw::{
    Content, Duplex, Dynamic, Field, Fixed, Gone, Route, Side, Size, Stream, Stretches, Trips,
    answer, ask, stream_in, stream_out, wake, woken,
};

/// Tests that spin take turns: there may be no more cores than two.
static TURN: Mutex<()> = Mutex::new(());

/// Runs both sides of a field, which is a file of its own.
fn both<L: Send, R: Send>(
    lines: usize,
    left: impl FnOnce(&Field) -> Result<L, Gone> + Send,
    right: impl FnOnce(&Field) -> Result<R, Gone> + Send,
) -> (L, R) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = std::env::temp_dir();
    let path: PathBuf = dir.join(format!(
        "teeline-raw.{}.{:x}",
        std::process::id(),
        fastrand::u64(..)
    ));
    Field::create(&path, lines).unwrap();
    let played = thread::scope(|scope| {
        let left = scope.spawn(|| left(&Field::open(&path).unwrap()).unwrap());
        let right = scope.spawn(|| right(&Field::open(&path).unwrap()).unwrap());
        (left.join().unwrap(), right.join().unwrap())
    });
    std::fs::remove_file(path).unwrap();
    played
}

const CONTENT: Content = Content { seed: 3 };

fn plays(route: Route, size: impl Size + Send + Sync) {
    let trips = Trips {
        warm_up: 50,
        batches: 5,
        singles: 300,
    };
    let (asked, wrong_there) = both(
        route.lines(size.bytes()),
        |field| {
            let mut left = route.end(field, Side::Left, size);
            field.meet(Side::Left, 1)?;
            ask(&mut left, size, CONTENT, trips)
        },
        |field| {
            let mut right = route.end(field, Side::Right, size);
            field.meet(Side::Right, 1)?;
            answer(&mut right, size, CONTENT, trips.messages())
        },
    );
    assert_eq!((asked.wrong, wrong_there), (0, 0), "{route:?}");
    assert_eq!((asked.batches.count(), asked.singles.count()), (5, 299));
    assert!(asked.batches.quantile_ns(0.0) > 0.0 && asked.singles.quantile_ns(0.0) > 0.0);
}

#[test]
fn messages_go_there_and_back_on_every_route() {
    plays(Route::Line, Fixed::<32>);
    plays(Route::Line, Dynamic(43));
    plays(Route::Walk { lines: 64 }, Fixed::<48>);
    plays(Route::Walk { lines: 63 }, Fixed::<64>);
    plays(Route::Walk { lines: 1 }, Dynamic(500));
    plays(Route::Copy, Fixed::<64>);
    plays(Route::Copy, Dynamic(1_000));
}

#[test]
fn an_answer_to_another_question_is_counted_as_wrong() {
    let (route, size) = (Route::Line, Fixed::<32>);
    let trips = Trips {
        warm_up: 10,
        batches: 0,
        singles: 0,
    };
    let (asked, wrong_there) = both(
        route.lines(32),
        |field| {
            ask(
                &mut route.end(field, Side::Left, size),
                size,
                CONTENT,
                trips,
            )
        },
        // It expects other messages; what it answers is what it was sent.
        |field| {
            let other = Content { seed: 4 };
            answer(&mut route.end(field, Side::Right, size), size, other, 10)
        },
    );
    assert_eq!((asked.wrong, wrong_there), (0, 10));

    let (asked, wrong_there) = both(
        route.lines(32),
        |field| {
            ask(
                &mut route.end(field, Side::Left, size),
                size,
                CONTENT,
                trips,
            )
        },
        // It answers with one bit changed.
        |field| {
            let mut right = route.end(field, Side::Right, size);
            for _ in 0..10 {
                let mut message = [0; 32];
                right.receive(&mut message)?;
                message[31] ^= 1;
                right.send(&message)?;
            }
            Ok(())
        },
    );
    assert_eq!((asked.wrong, wrong_there), (10, ()));
}

#[test]
fn streams_arrive_whole_and_in_order_round_after_round() {
    for (lines, bytes) in [(64, 48), (64, 64), (256, 1_024), (16, 900), (2, 112)] {
        let stream = Stream { lines };
        let (warm_up, messages) = (500, 5_000);
        let ((), arrived) = both(
            stream.field_lines(bytes),
            |field| stream_out(field, stream, Dynamic(bytes), CONTENT, warm_up + messages),
            |field| stream_in(field, stream, Dynamic(bytes), CONTENT, (warm_up, messages)),
        );
        assert_eq!(arrived.wrong, 0, "{bytes} bytes");
        let ns = arrived.stretches.ns_per_message();
        assert!(ns > 0.0 && ns < 1e9, "{ns}");
    }
}

#[test]
fn a_stream_of_something_else_is_wrong_in_every_message() {
    let stream = Stream { lines: 64 };
    let ((), arrived) = both(
        64,
        |field| stream_out(field, stream, Fixed::<48>, CONTENT, 100),
        |field| stream_in(field, stream, Fixed::<48>, Content { seed: 4 }, (0, 100)),
    );
    assert_eq!(arrived.wrong, 100);
}

#[test]
fn a_stretch_ends_when_as_many_have_come_as_go_round_and_counts_what_did() {
    let mut stretches = Stretches::begin(100, 35, 10);
    assert_eq!(stretches.next_end(), 110);
    stretches.end(112);
    assert_eq!(stretches.next_end(), 122);
    stretches.end(122);
    let ns = stretches.ns_per_message();
    assert!(ns > 0.0 && ns < 1e9, "{ns}");
    // Fewer than go round once are one stretch.
    assert_eq!(Stretches::begin(0, 4, 10).next_end(), 4);
    assert!(Stretches::begin(0, 4, 10).ns_per_message().is_nan());
}

#[test]
fn a_sleeper_is_woken_each_time() {
    let (took, (came, wrong)) = both(1, |field| wake(field, 50), |field| woken(field, 50));
    assert_eq!((took.count(), came.count(), wrong), (50, 50, 0));
    assert!(came.quantile_ns(0.0) > 0.0);
}
