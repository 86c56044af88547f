//! What a range answers: limit, filters, sorting and counting as etcd has them.
//!
//! `count` is of the whole range, untouched by limit and filters; filters and sorting come before the limit.
//!
//! etcd: server/etcdserver/txn/range.go.

use std::cmp::Ordering;

use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::KeyValue;
use ballast_storage::ReadError;
use ballast_storage::mvcc::{RangeOptions, RangeResult, View, WriteTxn};
use pb::range_request::{SortOrder, SortTarget};

/// A view, or a transaction that sees its own writes.
pub trait Ranged {
    fn range_raw(
        &self,
        key: &[u8],
        end: &[u8],
        options: &RangeOptions,
    ) -> Result<RangeResult, ReadError>;
}

impl Ranged for View {
    fn range_raw(
        &self,
        key: &[u8],
        end: &[u8],
        options: &RangeOptions,
    ) -> Result<RangeResult, ReadError> {
        self.range(key, end, options)
    }
}

impl Ranged for WriteTxn<'_> {
    fn range_raw(
        &self,
        key: &[u8],
        end: &[u8],
        options: &RangeOptions,
    ) -> Result<RangeResult, ReadError> {
        self.range(key, end, options)
    }
}

/// Answers a range; the header holds the revision only.
pub fn range(
    source: &impl Ranged,
    request: &pb::RangeRequest,
) -> Result<pb::RangeResponse, ReadError> {
    range_within(source, request, 0)
}

/// The same, unless what must be read is larger than `bytes_max`; 0 is no bound.
pub fn range_within(
    source: &impl Ranged,
    request: &pb::RangeRequest,
    bytes_max: u64,
) -> Result<pb::RangeResponse, ReadError> {
    let options = RangeOptions {
        revision: request.revision,
        limit: limit_below(request),
        count_only: request.count_only,
        // The index holds no values to sort by.
        keys_only: request.keys_only && request.sort_target != SortTarget::Value as i32,
        bytes_max,
    };
    let mut result = source.range_raw(&request.key, &request.range_end, &options)?;
    filter(&mut result.kvs, request);
    sort(&mut result.kvs, request);
    let limit = usize::try_from(request.limit).unwrap_or(0);
    let more = limit > 0 && result.kvs.len() > limit;
    if more {
        result.kvs.truncate(limit);
    }
    if request.keys_only {
        for kv in &mut result.kvs {
            kv.value.clear();
        }
    }
    Ok(pb::RangeResponse {
        header: Some(pb::ResponseHeader {
            revision: result.revision,
            ..Default::default()
        }),
        kvs: result.kvs,
        more,
        count: result.count,
    })
}

/// True when keys come as the store has them: ascending.
pub fn is_default_order(request: &pb::RangeRequest) -> bool {
    request.sort_order == SortOrder::None as i32
        || (request.sort_target == SortTarget::Key as i32
            && request.sort_order == SortOrder::Ascend as i32)
}

pub fn has_revision_filters(request: &pb::RangeRequest) -> bool {
    request.min_mod_revision != 0
        || request.max_mod_revision != 0
        || request.min_create_revision != 0
        || request.max_create_revision != 0
}

/// The limit the store may apply: one more than asked, to know whether there is more; none when all must be seen first.
fn limit_below(request: &pb::RangeRequest) -> usize {
    if request.limit <= 0 || !is_default_order(request) || has_revision_filters(request) {
        return 0;
    }
    // Sorting by another target with order NONE sorts too, but after the cut: etcd's own behaviour.
    usize::try_from(request.limit).map_or(0, |limit| limit.saturating_add(1))
}

fn filter(kvs: &mut Vec<KeyValue>, request: &pb::RangeRequest) {
    if !has_revision_filters(request) {
        return;
    }
    let within =
        |value: i64, min: i64, max: i64| (max == 0 || value <= max) && (min == 0 || value >= min);
    kvs.retain(|kv| {
        within(
            kv.mod_revision,
            request.min_mod_revision,
            request.max_mod_revision,
        ) && within(
            kv.create_revision,
            request.min_create_revision,
            request.max_create_revision,
        )
    });
}

fn sort(kvs: &mut [KeyValue], request: &pb::RangeRequest) {
    let target = SortTarget::try_from(request.sort_target).unwrap_or(SortTarget::Key);
    let descend = request.sort_order == SortOrder::Descend as i32;
    // Equal elements keep the order of their keys, descending too. etcd's sort promises no order for them, but up to twelve
    // elements it has this one.
    let by = |kvs: &mut [KeyValue], compare: fn(&KeyValue, &KeyValue) -> Ordering| {
        if descend {
            kvs.sort_by(|a, b| compare(b, a));
        } else {
            kvs.sort_by(compare);
        }
    };
    match target {
        // They come ascending, and no two are equal.
        SortTarget::Key if descend => kvs.reverse(),
        SortTarget::Key => {}
        SortTarget::Version => by(kvs, |a, b| a.version.cmp(&b.version)),
        SortTarget::Create => by(kvs, |a, b| a.create_revision.cmp(&b.create_revision)),
        SortTarget::Mod => by(kvs, |a, b| a.mod_revision.cmp(&b.mod_revision)),
        SortTarget::Value => by(kvs, |a, b| a.value.cmp(&b.value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(
        key: &'static str,
        create: i64,
        modified: i64,
        version: i64,
        value: &'static str,
    ) -> KeyValue {
        KeyValue {
            key: key.into(),
            create_revision: create,
            mod_revision: modified,
            version,
            value: value.into(),
            lease: 5,
        }
    }

    /// Three keys at revision 9, whatever is asked.
    struct Three;

    impl Ranged for Three {
        fn range_raw(
            &self,
            _: &[u8],
            _: &[u8],
            options: &RangeOptions,
        ) -> Result<RangeResult, ReadError> {
            let mut kvs = vec![
                kv("a", 2, 9, 3, "z"),
                kv("b", 3, 4, 2, "y"),
                kv("c", 5, 5, 1, "x"),
            ];
            if options.limit > 0 {
                kvs.truncate(options.limit);
            }
            if options.count_only {
                kvs.clear();
            }
            Ok(RangeResult {
                kvs,
                count: 3,
                revision: 9,
            })
        }
    }

    fn keys(request: &pb::RangeRequest) -> (String, bool, i64) {
        let answer = range(&Three, request).unwrap();
        let keys = answer
            .kvs
            .iter()
            .map(|kv| String::from_utf8_lossy(&kv.key).into_owned())
            .collect();
        (keys, answer.more, answer.count)
    }

    #[test]
    fn every_target_sorts_both_ways_and_before_the_limit() {
        for (target, ascending) in [
            (SortTarget::Key, "abc"),
            (SortTarget::Version, "cba"),
            (SortTarget::Create, "abc"),
            (SortTarget::Mod, "bca"),
            (SortTarget::Value, "cba"),
        ] {
            let mut request = pb::RangeRequest {
                sort_target: target as i32,
                sort_order: SortOrder::Ascend as i32,
                ..Default::default()
            };
            assert_eq!(
                keys(&request),
                (ascending.to_owned(), false, 3),
                "{target:?}"
            );
            request.sort_order = SortOrder::Descend as i32;
            let descending: String = ascending.chars().rev().collect();
            assert_eq!(keys(&request).0, descending, "{target:?}");
            request.limit = 1;
            assert_eq!(
                keys(&request),
                (descending[..1].to_owned(), true, 3),
                "{target:?}"
            );
        }
    }

    #[test]
    fn equal_ranks_stay_ascending_by_key() {
        let mut kvs = vec![
            kv("a", 1, 1, 1, ""),
            kv("b", 1, 1, 2, ""),
            kv("c", 1, 1, 1, ""),
        ];
        let mut request = pb::RangeRequest {
            sort_target: SortTarget::Version as i32,
            sort_order: SortOrder::Descend as i32,
            ..Default::default()
        };
        let order = |kvs: &[KeyValue]| -> String {
            kvs.iter()
                .map(|kv| String::from_utf8_lossy(&kv.key).into_owned())
                .collect()
        };
        sort(&mut kvs, &request);
        assert_eq!(order(&kvs), "bac");
        request.sort_order = SortOrder::Ascend as i32;
        sort(&mut kvs, &request);
        assert_eq!(order(&kvs), "acb");
    }

    /// etcd-io/etcd#18267.
    #[test]
    fn count_is_untouched_by_filters_and_limit() {
        let mut request = pb::RangeRequest {
            min_mod_revision: 5,
            ..Default::default()
        };
        assert_eq!(keys(&request), ("ac".to_owned(), false, 3));
        request.limit = 1;
        assert_eq!(keys(&request), ("a".to_owned(), true, 3));
        request.max_mod_revision = 5;
        assert_eq!(keys(&request), ("c".to_owned(), false, 3));
        request.count_only = true;
        assert_eq!(keys(&request), (String::new(), false, 3));
        let created = pb::RangeRequest {
            min_create_revision: 3,
            max_create_revision: 3,
            ..Default::default()
        };
        assert_eq!(keys(&created), ("b".to_owned(), false, 3));
    }

    #[test]
    fn limit_says_whether_there_is_more() {
        for (limit, expected) in [
            (0, ("abc", false)),
            (2, ("ab", true)),
            (3, ("abc", false)),
            (-1, ("abc", false)),
        ] {
            let request = pb::RangeRequest {
                limit,
                ..Default::default()
            };
            let (found, more, count) = keys(&request);
            assert_eq!(
                (found.as_str(), more, count),
                (expected.0, expected.1, 3),
                "{limit}"
            );
        }
    }
}
