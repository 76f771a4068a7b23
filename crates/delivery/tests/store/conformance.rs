//! What every database has to do alike: the tests that [`tests!`] makes for one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use teeline_core::{Name, Offset, Partition};
use teeline_delivery::store::{
    Abort, AtomicStore, Database, Fenced, Ownership, StoreError, sql::Sql,
};
use teeline_log::LogId;

use super::{SCHEMA, places::Place};

const P0: Partition = Partition(0);
const LOG: LogId = LogId(1);

macro_rules! tests {
    ($world:ty) => {
        conformance::tests!(
            $world:
            state_and_offset_are_found_together_by_the_next_owner
            a_zombie_is_fenced_and_the_error_names_both_sides
            two_owners_of_one_generation_cannot_apply_a_batch_twice
            an_owner_that_lost_its_partition_changes_nothing_beside_the_offset_either
            a_batch_that_fails_or_panics_leaves_no_trace_and_can_be_repeated
            partitions_and_topics_are_kept_apart
            a_partition_starts_where_its_first_owner_says
            state_of_another_log_is_refused
            two_owners_at_once_move_an_offset_once
            numbers_beyond_the_databases_are_errors
        );
    };
    ($world:ty: $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                if let Some(world) = <$world as places::Place>::new() {
                    conformance::$name(&world);
                }
            }
        )*
    };
}
pub(crate) use tests;

#[derive(Debug)]
enum ApplyError {
    Fenced(Box<Fenced>),
    Store(StoreError),
    Own,
}

impl From<StoreError> for ApplyError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Fenced(fenced) => Self::Fenced(fenced),
            error => Self::Store(error),
        }
    }
}

fn fills() -> Name {
    "fills".parse().unwrap()
}

fn open<W: Place>(world: &W) -> AtomicStore<W::Database> {
    world.open(&SCHEMA, LOG).unwrap()
}

fn claim<D: Database>(store: &mut AtomicStore<D>, generation: u64) -> Ownership {
    store.claim(&fills(), P0, generation).unwrap()
}

fn add<S: Sql>(tx: &mut S, number: u64) -> Result<(), S::Error> {
    tx.run("INSERT INTO sums VALUES (?1)", &[number.into()])?;
    Ok(())
}

/// Adds the numbers of the batch, which are its offsets.
fn apply<D: Database>(
    store: &mut AtomicStore<D>,
    owned: &mut Ownership,
    next: u64,
) -> Result<(), ApplyError> {
    let sum: u64 = (owned.next().0..next).sum();
    store.apply(owned, Offset(next), |tx| Ok(add(tx, sum)?))
}

fn total<D: Database>(store: &mut AtomicStore<D>) -> u64 {
    let totals = store.read(|tx| tx.rows("SELECT total FROM sums", &[], |row| row.int(0)));
    totals.unwrap().iter().sum()
}

pub(crate) fn state_and_offset_are_found_together_by_the_next_owner<W: Place>(world: &W) {
    let mut store = open(world);
    let mut owned = claim(&mut store, 1);
    assert_eq!(owned.next(), Offset(0));
    apply(&mut store, &mut owned, 4).unwrap();
    apply(&mut store, &mut owned, 10).unwrap();
    drop(store);
    let mut store = open(world);
    assert_eq!(claim(&mut store, 2).next(), Offset(10));
    assert_eq!(total(&mut store), 45);
}

/// HAZARDS GD-01: an owner that lost its partition while it was stopped changes nothing when it wakes up.
pub(crate) fn a_zombie_is_fenced_and_the_error_names_both_sides<W: Place>(world: &W) {
    let (mut first, mut second) = (open(world), open(world));
    let mut old = claim(&mut first, 1);
    apply(&mut first, &mut old, 10).unwrap();
    let mut new = claim(&mut second, 2);

    // From the claim on, before the new owner has applied anything.
    let Err(ApplyError::Fenced(fenced)) = apply(&mut first, &mut old, 20) else {
        panic!("the zombie was not fenced");
    };
    assert_eq!((fenced.generation, fenced.generation_on_record), (1, 2));
    assert_eq!(
        fenced.to_string(),
        format!(
            "partition 0 of topic fills is fenced in {}: this owner has generation 1 and stands at offset 10, on record \
             are generation 2 and offset 10: another owner has taken over, and this one must stop; where there is no \
             other, start it again, which takes over from whatever is on record",
            first.name()
        )
    );
    apply(&mut second, &mut new, 15).unwrap();
    assert!(matches!(
        apply(&mut first, &mut old, 20),
        Err(ApplyError::Fenced(_))
    ));
    assert!(matches!(
        first.claim(&fills(), P0, 1),
        Err(StoreError::Fenced(_))
    ));
    apply(&mut second, &mut new, 20).unwrap();
    assert_eq!(total(&mut second), (0..20).sum());
}

pub(crate) fn two_owners_of_one_generation_cannot_apply_a_batch_twice<W: Place>(world: &W) {
    let (mut first, mut second) = (open(world), open(world));
    let mut one = claim(&mut first, 1);
    let mut other = claim(&mut second, 1);
    apply(&mut first, &mut one, 10).unwrap();
    assert!(matches!(
        apply(&mut second, &mut other, 10),
        Err(ApplyError::Fenced(_))
    ));
    assert_eq!(total(&mut first), 45);
}

pub(crate) fn an_owner_that_lost_its_partition_changes_nothing_beside_the_offset_either<
    W: Place,
>(
    world: &W,
) {
    let mut store = open(world);
    let mut old = claim(&mut store, 1);
    let mut as_old = |store: &mut AtomicStore<W::Database>| {
        store.change_as_owner(&mut old, |tx| Ok::<_, Abort<ApplyError, _>>(add(tx, 1)?))
    };
    as_old(&mut store).unwrap();
    claim(&mut store, 2);
    assert!(matches!(as_old(&mut store), Err(ApplyError::Fenced(_))));
    assert_eq!(total(&mut store), 1);
    assert_eq!(store.progress().unwrap()[0].next, Offset(0));
}

pub(crate) fn a_batch_that_fails_or_panics_leaves_no_trace_and_can_be_repeated<W: Place>(
    world: &W,
) {
    let mut store = open(world);
    let mut owned = claim(&mut store, 1);
    let failed = store.apply(&mut owned, Offset(5), |tx| -> Result<(), _> {
        add(tx, 1)?;
        Err(Abort::Refused(ApplyError::Own))
    });
    assert!(matches!(failed, Err(ApplyError::Own)));
    let failed = store.apply(&mut owned, Offset(5), |tx| {
        tx.run("INSERT INTO sums VALUES (?1)", &["text".into()])?;
        Ok::<_, Abort<ApplyError, _>>(())
    });
    assert!(
        matches!(
            failed,
            Err(ApplyError::Store(
                StoreError::Database(_) | StoreError::Server { .. }
            ))
        ),
        "{failed:?}"
    );
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        store.apply(&mut owned, Offset(5), |tx| {
            add(tx, 1)?;
            if total_in(tx)? == 1 {
                panic!("in the middle of a batch");
            }
            Ok::<_, Abort<ApplyError, _>>(())
        })
    }));
    assert!(panicked.is_err());
    assert_eq!((total(&mut store), owned.next()), (0, Offset(0)));
    apply(&mut store, &mut owned, 5).unwrap();
    assert_eq!((total(&mut store), owned.next()), (10, Offset(5)));
}

fn total_in<S: Sql>(tx: &mut S) -> Result<u64, S::Error> {
    let totals = tx.rows("SELECT total FROM sums", &[], |row| row.int(0))?;
    Ok(totals.iter().sum())
}

pub(crate) fn partitions_and_topics_are_kept_apart<W: Place>(world: &W) {
    let mut store = open(world);
    let orders = "orders".parse().unwrap();
    let mut fills_0 = claim(&mut store, 1);
    let mut fills_1 = store.claim(&fills(), Partition(1), 7).unwrap();
    let mut orders_0 = store.claim(&orders, P0, 3).unwrap();
    apply(&mut store, &mut fills_0, 1).unwrap();
    apply(&mut store, &mut fills_1, 2).unwrap();
    apply(&mut store, &mut orders_0, 3).unwrap();
    assert_eq!(claim(&mut store, 1).next(), Offset(1));
    let fills_1 = store.claim(&fills(), Partition(1), 7).unwrap();
    assert_eq!(fills_1.next(), Offset(2));
}

pub(crate) fn a_partition_starts_where_its_first_owner_says<W: Place>(world: &W) {
    let mut store = open(world);
    let claim = |store: &mut AtomicStore<W::Database>, generation, first| {
        let claimed = store.claim_from(&fills(), P0, generation, Offset(first));
        claimed.unwrap().next()
    };
    assert_eq!(claim(&mut store, 1, 40), Offset(40));
    assert_eq!(claim(&mut store, 2, 7), Offset(40));
}

pub(crate) fn state_of_another_log_is_refused<W: Place>(world: &W) {
    let mut store = open(world);
    // Both were first in a new database.
    let mut late = world.open(&SCHEMA, LogId(2)).unwrap();
    let mut owned = claim(&mut store, 1);
    assert!(matches!(
        late.claim(&fills(), P0, 2),
        Err(StoreError::ForeignLog { .. })
    ));
    apply(&mut store, &mut owned, 5).unwrap();
    let other = LogId(2);
    let error = world.open(&SCHEMA, other).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{} holds state of log {LOG}, not of log {other}: name the database of this log, or a new one",
            store.name()
        )
    );
    apply(&mut store, &mut owned, 6).unwrap();
}

/// Two threads apply the same batches under one generation, as fast as they can: each batch takes effect once.
pub(crate) fn two_owners_at_once_move_an_offset_once<W: Place + Sync>(world: &W) {
    const BATCHES: u64 = 40;
    let owner = || {
        let mut store = open(world);
        let mut applied = 0;
        loop {
            let mut owned = claim(&mut store, 1);
            if owned.next().0 >= BATCHES {
                return applied;
            }
            let next = owned.next().0 + 1;
            match apply(&mut store, &mut owned, next) {
                Ok(()) => applied += 1,
                Err(ApplyError::Fenced(_)) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    };
    let applied = std::thread::scope(|scope| {
        let owners = [scope.spawn(owner), scope.spawn(owner)];
        owners.map(|owner| owner.join().unwrap())
    });
    assert_eq!(applied[0] + applied[1], BATCHES);
    assert_eq!(total(&mut open(world)), (0..BATCHES).sum());
}

pub(crate) fn numbers_beyond_the_databases_are_errors<W: Place>(world: &W) {
    let mut store = open(world);
    let mut insert =
        |number: u64| store.change(|tx| Ok::<_, Abort<ApplyError, _>>(add(tx, number)?));
    insert(i64::MAX.cast_unsigned()).unwrap();
    assert!(matches!(insert(1 << 63), Err(ApplyError::Store(_))));
    let negative = store.change(|tx| {
        tx.run("UPDATE sums SET total = -1", &[])?;
        Ok::<_, Abort<ApplyError, _>>(())
    });
    negative.unwrap();
    let read = store.read(|tx| total_in(tx));
    assert!(read.is_err(), "{read:?}");
}
