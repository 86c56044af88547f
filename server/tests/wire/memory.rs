//! Memory: many large lists at once stay within the budget for them.

use ballast_api::etcdserverpb as pb;

use crate::harness::{Server, prefix, put};

const VALUE_BYTES: usize = 1 << 20;
const VALUES: usize = 24;
const LISTS: usize = 16;
const BUDGET: &str = "--response-memory-bytes=67108864";

/// The most the process ever had resident, in MiB.
fn peak_mib(server: &Server) -> u64 {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", server.pid().as_raw_nonzero())).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib / 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_large_lists_at_once_are_bounded() {
    // Without a cache every list reads its values from the disk into memory of its own.
    let server = Server::start_with(&[BUDGET, "--value-cache-bytes=0"]);
    let mut kv = server.kv().await;
    for n in 0..VALUES {
        let request = put(format!("large/{n:03}"), vec![b'v'; VALUE_BYTES]);
        kv.put(request).await.unwrap();
    }
    let before = peak_mib(&server);
    let mut lists = Vec::new();
    for n in 0..LISTS {
        let mut kv = server.kv().await.max_decoding_message_size(usize::MAX);
        lists.push(tokio::spawn(async move {
            if n % 2 == 0 {
                let answer = kv.range(prefix("large/")).await.unwrap().into_inner();
                answer.kvs.len()
            } else {
                let range = pb::request_op::Request::RequestRange(prefix("large/"));
                let request = pb::TxnRequest {
                    success: vec![pb::RequestOp {
                        request: Some(range),
                    }],
                    ..Default::default()
                };
                let answer = kv.txn(request).await.unwrap().into_inner();
                match answer.responses[0].response.as_ref().unwrap() {
                    pb::response_op::Response::ResponseRange(range) => range.kvs.len(),
                    other => panic!("{other:?}"),
                }
            }
        }));
    }
    for list in lists {
        assert_eq!(list.await.unwrap(), VALUES);
    }
    // All at once they would take LISTS * 2 * 24 MiB = 768 MiB; the budget lets 64 MiB pass, and the allocator keeps some.
    let peak = peak_mib(&server);
    assert!(peak < before + 300, "from {before} to {peak} MiB");
}
