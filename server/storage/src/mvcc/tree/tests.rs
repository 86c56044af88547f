//! The tree against a `BTreeMap`, and its own invariants.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

impl Live for (u32, bool) {
    fn is_live(&self) -> bool {
        self.1
    }
}

type Model = BTreeMap<Vec<u8>, (u32, bool)>;

#[derive(Clone, Debug)]
enum Op {
    Put(Vec<u8>, u32, bool),
    Remove(Vec<u8>),
    /// Remove this many keys in order from here: what a compaction of a deleted range does.
    RemoveRun(Vec<u8>, usize),
    /// Put this many keys in order from here.
    PutRun(u16, usize),
    Snapshot,
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => (0..2000u16).prop_map(run_key),
        1 => proptest::collection::vec(0..4u8, 0..6),
        1 => (0..20u8, 100..9000usize).prop_map(|(byte, len)| vec![byte; len]),
    ]
}

fn run_key(i: u16) -> Vec<u8> {
    format!("/registry/{i:05}").into_bytes()
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (key(), any::<u32>(), any::<bool>()).prop_map(|(k, v, live)| Op::Put(k, v, live)),
        4 => key().prop_map(Op::Remove),
        1 => (key(), 1..300usize).prop_map(|(k, n)| Op::RemoveRun(k, n)),
        1 => (0..1800u16, 1..200usize).prop_map(|(k, n)| Op::PutRun(k, n)),
        1 => Just(Op::Snapshot),
    ]
}

/// Counts agree with what is there, all leaves lie at one depth, keys ascend and respect their separators.
fn check_node(node: &Node<(u32, bool)>, depth: usize, leaf_depth: &mut Option<usize>) -> Counts {
    let mut total = Counts::default();
    match node {
        Node::Leaf(leaf) => {
            assert_eq!(*leaf_depth.get_or_insert(depth), depth);
            assert_eq!(leaf.keys.len(), leaf.values.len());
            assert!(leaf.values.len() <= ENTRIES_MAX);
            for value in &leaf.values {
                total += count_of(value);
            }
        }
        Node::Inner(inner) => {
            assert!(
                inner.children.len() >= 2 || depth > 0,
                "a root with one child"
            );
            assert_eq!(inner.children.len(), inner.counts.len());
            assert_eq!(inner.children.len(), inner.separators.len() + 1);
            assert!(inner.children.len() <= ENTRIES_MAX);
            for (child, counts) in inner.children.iter().zip(&inner.counts) {
                assert_eq!(check_node(child, depth + 1, leaf_depth), *counts);
                assert!(counts.all > 0, "an empty child");
                total += *counts;
            }
        }
    }
    total
}

fn check(tree: &Tree<(u32, bool)>, model: &Model) {
    assert_eq!(check_node(&tree.root, 0, &mut None), tree.counts);
    let all: Vec<_> = tree.from(b"").map(|(k, v)| (k.to_vec(), *v)).collect();
    let expected: Vec<_> = model.iter().map(|(k, v)| (k.clone(), *v)).collect();
    assert_eq!(all, expected);
    assert_eq!(tree.len(), model.len());
    assert_eq!(tree.live_len(), model.values().filter(|v| v.1).count());
}

fn check_from(tree: &Tree<(u32, bool)>, model: &Model, start: &[u8]) {
    let live = |(_, v): &(_, &(u32, bool))| v.1;
    let from: Vec<_> = tree
        .live_from(start)
        .map(|(k, _)| k.to_vec())
        .take(70)
        .collect();
    let expected: Vec<_> = model
        .range(start.to_vec()..)
        .filter(live)
        .map(|(k, _)| k.clone())
        .take(70)
        .collect();
    assert_eq!(from, expected);
    assert_eq!(
        tree.live_before(start),
        model.range(..start.to_vec()).filter(live).count()
    );
    assert_eq!(tree.get(start), model.get(start));
}

fn run(ops: &[Op]) {
    let mut tree = Tree::default();
    let mut model = Model::new();
    let mut snapshots = Vec::new();
    for op in ops {
        let at = match op {
            Op::Put(key, value, live) => {
                tree.upsert(key, |old| {
                    assert_eq!(old, model.get(key));
                    (*value, *live)
                });
                model.insert(key.clone(), (*value, *live));
                key.clone()
            }
            Op::Remove(key) => {
                assert_eq!(tree.remove(key), model.remove(key));
                key.clone()
            }
            Op::RemoveRun(key, n) => {
                let run: Vec<_> = model
                    .range(key.clone()..)
                    .map(|(k, _)| k.clone())
                    .take(*n)
                    .collect();
                for key in run {
                    assert_eq!(tree.remove(&key), model.remove(&key));
                }
                key.clone()
            }
            Op::PutRun(first, n) => {
                for i in *first..*first + *n as u16 {
                    tree.upsert(&run_key(i), |_| (u32::from(i), true));
                    model.insert(run_key(i), (u32::from(i), true));
                }
                run_key(*first)
            }
            Op::Snapshot => {
                snapshots.push((tree.clone(), model.clone()));
                continue;
            }
        };
        check_from(&tree, &model, &at);
    }
    check(&tree, &model);
    for (tree, model) in &snapshots {
        check(tree, model); // nothing that came later shows in them
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn it_is_an_ordered_map_with_snapshots(ops in proptest::collection::vec(op(), 1..300)) {
        run(&ops);
    }
}

fn leaves(node: &Node<(u32, bool)>) -> usize {
    match node {
        Node::Leaf(_) => 1,
        Node::Inner(inner) => inner.children.iter().map(|child| leaves(child)).sum(),
    }
}

#[test]
fn keys_in_order_fill_their_leaves() {
    let mut tree = Tree::default();
    for i in 0..100_000u32 {
        tree.upsert(format!("{i:08}").as_bytes(), |_| (i, true));
    }
    assert!(
        leaves(&tree.root) < 100_000 / 60,
        "{} leaves",
        leaves(&tree.root)
    );
    for i in 0..100_000u32 {
        assert!(tree.remove(format!("{i:08}").as_bytes()).is_some());
    }
    assert!(tree.is_empty());
    assert_eq!(check_node(&tree.root, 0, &mut None), Counts::default());
}
