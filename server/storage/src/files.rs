//! Large files that go without anyone noticing.
//!
//! A file system frees a large file in one transaction of its journal, and tells the disk of all its blocks at once: tens of
//! milliseconds in which no sync of the log comes through. In small steps each of them is short.

use std::fs::File;
use std::time::Duration;

const STEP_BYTES: u64 = 4 << 20;
/// Between two steps: the transaction of the last one has gone to the disk with a sync of the log.
const REST: Duration = Duration::from_millis(10);

/// Frees the blocks of a file that was removed and that nobody else has open. It stops early when `rest` says so, and on an error:
/// closing frees what is left.
pub(crate) fn free(file: &File, mut rest: impl FnMut(Duration) -> bool) {
    let mut bytes = file.metadata().map_or(0, |metadata| metadata.len());
    while bytes > STEP_BYTES {
        bytes -= STEP_BYTES;
        if file.set_len(bytes).is_err() || !rest(REST) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_freed_from_its_end_in_steps_until_told_to_stop() {
        let file = tempfile::tempfile().unwrap();
        let blocks = || file.metadata().unwrap().len().div_ceil(STEP_BYTES);
        file.set_len(10 * STEP_BYTES - 1).unwrap();
        let mut left = Vec::new();
        free(&file, |_| {
            left.push(blocks());
            left.len() < 3
        });
        assert_eq!(left, [9, 8, 7]);
        free(&file, |_| true);
        assert_eq!(blocks(), 1);
    }
}
