//! A sync of sled's that fails: an error, and nothing more is written. A process of its own, since the failure is the whole process's.

use ballast_storage::backend::{Batch, Kind};
use bytes::Bytes;

fn batch(number: u8) -> Batch {
    let mut batch = Batch::default();
    batch.put("number", vec![number]);
    batch.put(format!("k{number}"), vec![number; 1000]);
    batch
}

#[test]
fn a_failed_sync_ends_the_write_with_an_error_whichever_call_it_is() {
    // A batch takes two or three syncs, on several threads: each of them, and none, fails in turn.
    for skipped in 1..=4 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("000001.sled");
        let engine = Kind::Sled.open(&path, 1 << 20).unwrap();
        engine.write(&batch(1)).unwrap();
        ballast_sync_shim::fail_from(ballast_sync_shim::calls() + skipped);
        let mut failed = None;
        for number in 2..20 {
            if let Err(error) = engine.write(&batch(number)) {
                failed = Some((number, error.to_string()));
                break;
            }
        }
        let (number, error) = failed.expect("no sync failed");
        assert!(error.contains("000001.sled"), "{error}");
        // A sync that works again changes nothing: what the first lost is not known.
        ballast_sync_shim::fail_from(u64::MAX);
        engine.write(&batch(30)).unwrap_err();
        drop(engine);
        let engine = Kind::Sled.open(&path, 1 << 20).unwrap();
        let found = engine.get(b"number").unwrap().unwrap()[0];
        // The batch that failed may be there or not, whole; none after it.
        assert!(
            found == number - 1 || found == number,
            "{found} of {number}"
        );
        let last = engine.get(format!("k{found}").as_bytes()).unwrap();
        assert_eq!(last, Some(Bytes::from(vec![found; 1000])));
        let further = engine.get(format!("k{}", found + 1).as_bytes()).unwrap();
        assert_eq!(further, None);
    }
}
