//! What the service refuses, and what it says then.

use std::{fs, path::Path};

use rust_decimal::Decimal;
use teeline_core::{Offset, Partition};
use teeline_delivery::{
    consumer::ConsumerError,
    mode::DeliveryError,
    positions::{FILL, Fill, Positions, Side},
};
use teeline_log::Log;

use super::{
    day::Day,
    places::{name, options},
    run_to_end,
};

const P0: Partition = Partition(0);

fn day(fills: usize) -> Day {
    Day::write(1, fills, &mut fastrand::Rng::with_seed(9))
}

#[test]
fn a_record_that_is_no_fill_stops_the_service_behind_what_came_before_it() {
    for (kind, value, expected) in [
        (
            7,
            &b"order"[..],
            "offset 2 of partition 0 of topic fills is of type 7, not a fill (type 1): route other types to another topic",
        ),
        (
            FILL,
            b"\x02",
            "offset 2 of partition 0 of topic fills is no fill that can be read: fill format version 2 is not supported: \
             this build reads and writes version 1",
        ),
    ] {
        let mut day = day(2);
        day.append_value(P0, kind, value);
        let mut positions = day.open().unwrap();
        assert_eq!(positions.run_once(10).unwrap(), 2);
        for _ in 0..2 {
            assert_eq!(positions.run_once(10).unwrap_err().to_string(), expected);
        }
        day.assert_consistent();
        assert_eq!(day.snapshot().progress[0].next, Offset(2));
    }
}

#[test]
fn a_fill_that_would_make_a_position_inexact_is_named_and_nothing_is_rounded() {
    let mut day = day(0);
    let fill = Fill {
        exec_id: 41,
        account: "acct-1".into(),
        symbol: "AAPL".into(),
        side: Side::Buy,
        price: Decimal::ONE,
        quantity: Decimal::MAX,
        event_time_ns: 0,
    };
    day.append_fill(&fill);
    let mut positions = day.open().unwrap();
    positions.run_once(10).unwrap();
    day.append_fill(&Fill {
        exec_id: 42,
        ..fill
    });
    let error = positions.run_once(10).unwrap_err();
    assert_eq!(
        error.to_string(),
        "fill 42 at offset 1 of partition 0 of topic fills cannot be added to the position of account acct-1 in AAPL (buy \
         79228162514264337593543950335 at 1): its quantity would need more than 96 bits or 28 decimal places"
    );
    let snapshot = day.snapshot();
    assert_eq!(snapshot.positions[0].quantity, Decimal::MAX);
    assert_eq!(
        (snapshot.fills(), snapshot.progress[0].next),
        (1, Offset(1))
    );
}

#[test]
fn positions_of_another_log_are_refused() {
    let (one, other) = (day(3), day(3));
    run_to_end(&mut one.open().unwrap(), 10);
    let error = Positions::open(
        &one.database,
        &other.log,
        &name("positions"),
        &name("fills"),
    )
    .unwrap_err();
    assert!(matches!(*error.source, DeliveryError::Store(_)), "{error}");
    let expected = format!(
        "{} holds state of log {}, not of log {}",
        one.database.display(),
        one.log.id(),
        other.log.id()
    );
    assert!(error.to_string().starts_with(&expected), "{error}");
    one.assert_finished();
    let claimed = other.log.group_offsets().unwrap();
    assert_eq!(claimed, [], "an owner was fenced for nothing");
}

#[test]
fn positions_ahead_of_an_older_copy_of_the_log_are_refused() {
    let mut day = day(3);
    let copy = day.dir.path().join("copy");
    copy_directory(&day.dir.path().join("log"), &copy);
    day.append_fills(3, &mut fastrand::Rng::with_seed(10));
    run_to_end(&mut day.open().unwrap(), 10);
    let older = Log::open(copy, &options()).unwrap();
    let error =
        Positions::open(&day.database, &older, &name("positions"), &name("fills")).unwrap_err();
    assert!(
        matches!(
            *error.source,
            DeliveryError::Consumer(ConsumerError::AheadOfLog { .. })
        ),
        "{error}"
    );
    assert_eq!(
        error.to_string(),
        format!(
            "all before offset 6 of partition 0 of topic fills was read before, but the partition ends at offset 3: if a \
             power cut took what was not synced, start its writer, which says so in the log; if the log is an older copy, \
             restore the newer one, or seek to offset 3 to take what comes there for new; or move {} away to compute the \
             positions afresh",
            day.database.display()
        )
    );
}

fn copy_directory(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_directory(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
