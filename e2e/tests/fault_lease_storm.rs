//! Very many leases run out in the same moment: they are revoked at the promised rate, and puts hardly notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb::{LeaseGrantRequest, LeaseLeasesRequest, PutRequest, RangeRequest};
use ballast_e2e::load::{Kind, Measured, Plan, run};
use ballast_e2e::store_server::{Client, Program, StoreServer};
use ballast_e2e::up::say;
use ballast_e2e::wait::{self, wait_for};

/// So many where the server is quick enough; all end in the same second.
const LEASES_MAX: i64 = 100_000;
/// Fewer would be no storm.
const LEASES_MIN: i64 = 20_000;
/// Every so many leases own a key, so that revocations write too.
const KEY_EVERY: i64 = 10;
const GRANTERS: i64 = 64;
/// Granting ends here at the latest, and all leases there.
const GRANTED_AFTER: Duration = Duration::from_secs(60);
const ENDED_AFTER: Duration = Duration::from_secs(75);
/// The storm is watched for so long, not to its end.
const WATCHED: Duration = Duration::from_secs(15);
const REVOKES_PER_SECOND_MAX: f64 = 1_000.0;
const PUT_EVERY: Duration = Duration::from_millis(4);

/// Says how many.
async fn grant_all(server: &StoreServer) -> Result<i64> {
    let begun = wait::now();
    let mut granters = Vec::new();
    for granter in 0..GRANTERS {
        let Client {
            mut lease, mut kv, ..
        } = server.client()?;
        granters.push(tokio::spawn(async move {
            let mut granted = 0;
            for id in (1..=LEASES_MAX).filter(|id| id % GRANTERS == granter) {
                if begun.elapsed() > GRANTED_AFTER {
                    break;
                }
                let ttl = ENDED_AFTER.saturating_sub(begun.elapsed()).as_secs() as i64;
                lease.lease_grant(LeaseGrantRequest { ttl, id }).await?;
                granted += 1;
                if id % KEY_EVERY == 0 {
                    let request = PutRequest {
                        key: format!("leased/{id:08}").into(),
                        lease: id,
                        ..PutRequest::default()
                    };
                    kv.put(request).await?;
                }
            }
            anyhow::Ok(granted)
        }));
    }
    let mut granted = 0;
    for granter in granters {
        granted += granter.await??;
    }
    Ok(granted)
}

async fn lease_count(client: &Client) -> Result<i64> {
    let answer = client
        .clone()
        .lease
        .lease_leases(LeaseLeasesRequest {})
        .await?
        .into_inner();
    Ok(answer.leases.len() as i64)
}

fn puts() -> Plan {
    Plan {
        kind: Kind::Put {
            prefix: "storm/".to_owned(),
            keys: 1_000,
            value: vec![b'v'; 256].into(),
        },
        period: PUT_EVERY,
    }
}

async fn measure(clients: &[Client], until: impl Future<Output = Result<()>>) -> Result<Measured> {
    let stop = Arc::new(AtomicBool::new(false));
    let plan = puts();
    let (measured, ended) = tokio::join!(run(clients, &plan, Arc::clone(&stop)), async {
        let ended = until.await;
        stop.store(true, Ordering::Release);
        ended
    });
    ended?;
    measured
}

fn tell(what: &str, measured: &Measured) {
    say(&format!(
        "{what}: {} puts, p50 {:?}, p99 {:?}, slowest {:?}",
        measured.count(),
        measured.quantile(0.5),
        measured.quantile(0.99),
        measured.max()
    ));
}

async fn storm(program: &Program) -> Result<()> {
    let server = StoreServer::start(program, &[]).await?;
    let client = server.client()?;
    let clients = [server.client()?, server.client()?];
    let begun = wait::now();
    let leases = grant_all(&server).await.context("grant all leases")?;
    say(&format!("{leases} leases granted in {:?}", begun.elapsed()));
    ensure!(leases >= LEASES_MIN, "too few for a storm");
    let quiet = measure(&clients, async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        Ok(())
    })
    .await?;
    tell("quiet", &quiet);
    ensure!(lease_count(&client).await? == leases, "a lease ended early");

    wait_for("the first lease ends", Duration::from_secs(100), || async {
        Ok((lease_count(&client).await? < leases).then_some(()))
    })
    .await?;
    // In a second all are past their time: more at once than may be revoked.
    let from = lease_count(&client).await?;
    let begun = wait::now();
    let stormy = measure(&clients, async {
        tokio::time::sleep(WATCHED).await;
        Ok(())
    })
    .await?;
    let watched = begun.elapsed().as_secs_f64();
    let revoked = from - lease_count(&client).await?;
    tell("storm", &stormy);
    let rate = revoked as f64 / watched;
    say(&format!(
        "{revoked} revoked in {watched:.1} s: {rate:.0} a second"
    ));
    ensure!(quiet.failed + stormy.failed == 0, "a put failed");
    // One burst of half a second may lie on either edge.
    ensure!(
        rate <= REVOKES_PER_SECOND_MAX + 500.0 / watched,
        "more revocations than promised"
    );
    ensure!(rate > 300.0, "revocation does not keep up");
    let allowed = 4 * quiet.quantile(0.99) + Duration::from_millis(100);
    ensure!(
        stormy.quantile(0.99) <= allowed,
        "puts wait for revocations: allowed {allowed:?}"
    );

    // What is revoked takes its key along, and nothing else does.
    let answer = client
        .clone()
        .kv
        .range(RangeRequest {
            key: "leased/".into(),
            range_end: "leased0".into(),
            count_only: true,
            ..RangeRequest::default()
        })
        .await?
        .into_inner();
    let left = lease_count(&client).await?;
    ensure!(
        answer.count >= left / KEY_EVERY - 1_000 && answer.count < leases / KEY_EVERY,
        "{left} leases are left and {} keys",
        answer.count
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_leases_that_end_together_do_not_hold_up_puts() {
    let program = Program::under_test().expect("the server under test is built");
    storm(&program).await.expect("the storm is weathered");
}
