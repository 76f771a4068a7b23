//! The raw loops, between two threads that map one field each for itself.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
};

use teeline_latency::{
    Stopwatch,
    raw::{
        Content, Dynamic, Field, Fixed, Gone, Route, Size, Stream, ping, pong, stream_in,
        stream_out, wake, woken,
    },
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
    let (warm_up, trips) = (50, 600);
    let ((times, wrong), wrong_there) = both(
        route.lines(size.bytes()),
        |field| {
            let mut watch = Stopwatch::start();
            let wrong = ping(field, route, size, CONTENT, (warm_up, trips), &mut watch)?;
            Ok((watch.stop(1), wrong))
        },
        |field| pong(field, route, size, CONTENT, warm_up + trips),
    );
    assert_eq!((wrong, wrong_there), (0, 0), "{route:?}");
    assert_eq!(times.count(), trips);
    assert!(times.quantile_ns(0.0) > 0.0);
}

#[test]
fn messages_go_there_and_back_on_every_route() {
    plays(Route::Line, Fixed::<32>);
    plays(Route::Line, Dynamic(56));
    plays(Route::Walk { lines: 64 }, Fixed::<48>);
    plays(Route::Copy, Fixed::<64>);
    plays(Route::Copy, Dynamic(1_000));
}

#[test]
fn an_answer_to_another_question_is_counted_as_wrong() {
    let route = Route::Line;
    let (wrong, wrong_there) = both(
        route.lines(32),
        |field| {
            ping(
                field,
                route,
                Fixed::<32>,
                CONTENT,
                (0, 10),
                &mut Stopwatch::start(),
            )
        },
        // It expects other messages; what it answers is what it was sent.
        |field| pong(field, route, Fixed::<32>, Content { seed: 4 }, 10),
    );
    assert_eq!((wrong, wrong_there), (0, 10));
}

#[test]
fn streams_arrive_whole_and_in_order_round_after_round() {
    for (lines, bytes) in [(64, 48), (64, 64), (256, 1_024), (16, 900), (1, 8)] {
        let stream = Stream { lines };
        let (warm_up, messages) = (500, 5_000);
        let ((), arrived) = both(
            lines,
            |field| stream_out(field, stream, Dynamic(bytes), CONTENT, warm_up + messages),
            |field| stream_in(field, stream, Dynamic(bytes), CONTENT, (warm_up, messages)),
        );
        assert_eq!(
            (arrived.wrong, arrived.timed),
            (0, messages),
            "{bytes} bytes"
        );
        assert!(arrived.ticks > 0);
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
fn a_sleeper_is_woken_each_time() {
    let (times, wrong) = both(
        1,
        |field| {
            let mut watch = Stopwatch::start();
            wake(field, 50, &mut watch)?;
            Ok(watch.stop(1))
        },
        |field| woken(field, 50),
    );
    assert_eq!((times.count(), wrong), (50, 0));
}
