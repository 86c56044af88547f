//! The planner as tables: what is different from a healthy store, and the step that follows.

use crate::support::{CREATED, NOW, UID, backup, desired, desired_with, healthy, report};
use ballast_operator::clock;
use ballast_operator::cluster::build::pod::{RestoreSource, Start};
use ballast_operator::cluster::observe::{Observed, StoreView};
use ballast_operator::cluster::plan::{DefragCause, PodFault, ServiceKind, Step, Wait, plan};
use ballast_operator::cluster::validate::Desired;
use ballast_operator::crd::LastDefragmentation;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use serde_json::json;

/// The step for a healthy store after `change`.
fn step(desired: &Desired, change: impl FnOnce(&mut Observed)) -> Step {
    let mut observed = healthy(desired);
    change(&mut observed);
    plan(desired, &observed).step
}

fn waits(step: &Step) -> &'static str {
    match step {
        Step::Wait(wait) => wait.name(),
        other => panic!("{other:?} is not a wait"),
    }
}

fn fresh(observed: &mut Observed) {
    *observed = Observed {
        now: NOW,
        ..Observed::default()
    };
}

fn gone() -> Time {
    clock::at(NOW)
}

#[test]
fn a_healthy_store_is_left_alone_until_its_next_backup() {
    let decision = plan(&desired(), &healthy(&desired()));
    assert_eq!(decision.step, Step::Idle);
    assert_eq!(decision.again_secs, 30);
}

#[test]
fn objects_come_into_being_one_at_a_time_and_in_order() {
    let d = desired();
    let whole = healthy(&d);
    let mut now = Observed {
        now: NOW,
        ..Observed::default()
    };
    assert_eq!(plan(&d, &now).step, Step::ApplyService(ServiceKind::Peer));
    now.peer_service.clone_from(&whole.peer_service);
    assert_eq!(plan(&d, &now).step, Step::ApplyService(ServiceKind::Client));
    now.client_service.clone_from(&whole.client_service);
    assert_eq!(plan(&d, &now).step, Step::CreateVolume);
    now.volume.clone_from(&whole.volume);
    assert_eq!(plan(&d, &now).step, Step::CreateBackupVolume);
    now.backup_volume.clone_from(&whole.backup_volume);
    assert_eq!(plan(&d, &now).step, Step::CreatePod(Start::New));
}

#[test]
fn a_paused_store_is_only_watched() {
    let d = desired_with(json!({ "paused": true }));
    assert_eq!(waits(&step(&d, fresh)), "Paused");
    assert_eq!(waits(&step(&d, |o| o.pod = None)), "Paused");
}

#[test]
fn more_than_one_replica_is_answered_with_a_sentence_and_nothing_else() {
    let d = desired_with(json!({ "replicas": 3 }));
    let step = step(&d, fresh);
    let Step::Wait(wait) = &step else {
        panic!("{step:?}")
    };
    assert_eq!(wait.name(), "ReplicasNotSupported");
    assert!(wait.needs_a_person());
    assert!(
        wait.sentence().contains("replicas 3"),
        "{}",
        wait.sentence()
    );
}

#[test]
fn an_object_that_is_being_deleted_is_waited_for_and_never_acted_on() {
    let d = desired();
    let deleted = |change: fn(&mut Observed)| waits(&step(&d, change));
    assert_eq!(
        deleted(|o| o.pod.as_mut().unwrap().metadata.deletion_timestamp = Some(gone())),
        "ObjectTerminating"
    );
    assert_eq!(
        deleted(|o| o.volume.as_mut().unwrap().metadata.deletion_timestamp = Some(gone())),
        "ObjectTerminating"
    );
    assert_eq!(
        deleted(|o| o.peer_service.as_mut().unwrap().metadata.deletion_timestamp = Some(gone())),
        "ObjectTerminating"
    );
}

#[test]
fn an_object_of_another_owner_is_never_taken_over() {
    let d = desired();
    let other = OwnerReference {
        controller: Some(true),
        uid: "somebody-else".to_owned(),
        ..OwnerReference::default()
    };
    let step = step(&d, |o| {
        o.volume.as_mut().unwrap().metadata.owner_references = Some(vec![other]);
    });
    assert_eq!(waits(&step), "NameTaken");
}

#[test]
fn a_service_that_only_happens_to_have_the_name_is_left_alone() {
    let step = step(&desired(), |o| {
        let service = o.peer_service.as_mut().unwrap();
        service.metadata.labels = None;
        service.metadata.owner_references = None;
    });
    assert_eq!(waits(&step), "NameTaken");
}

/// Others let a blank volume start a new, empty store under the same name.
#[test]
fn a_lost_volume_of_a_store_that_ran_is_never_replaced_by_an_empty_one() {
    let d = desired();
    assert_eq!(waits(&step(&d, |o| o.volume = None)), "VolumeLost");
    let never_ran = step(&d, |o| {
        o.volume = None;
        o.history.cluster_id = None;
    });
    assert_eq!(never_ran, Step::CreateVolume);
}

#[test]
fn the_pod_of_a_store_that_ran_before_starts_as_existing() {
    assert_eq!(
        step(&desired(), |o| o.pod = None),
        Step::CreatePod(Start::Existing)
    );
}

/// After a node was shut down its pods stay Succeeded or Failed for ever.
#[test]
fn a_pod_that_ended_is_replaced() {
    for phase in ["Succeeded", "Failed"] {
        let step = step(&desired(), |o| {
            o.pod.as_mut().unwrap().status.as_mut().unwrap().phase = Some(phase.to_owned());
        });
        assert_eq!(step, Step::DeletePod(PodFault::Terminated), "{phase}");
    }
}

#[test]
fn a_pod_of_an_older_spec_is_replaced_but_not_under_a_backup() {
    let d = desired();
    let newer = desired_with(json!({ "quota": "2Gi" }));
    let mut observed = healthy(&d);
    assert_eq!(
        plan(&newer, &observed).step,
        Step::DeletePod(PodFault::OutOfDate)
    );
    observed.backups = vec![backup("sample-1", UID, None)];
    assert_eq!(plan(&newer, &observed).step, Step::Idle);
    observed
        .pod
        .as_mut()
        .unwrap()
        .status
        .as_mut()
        .unwrap()
        .conditions = None;
    assert_eq!(
        plan(&newer, &observed).step,
        Step::DeletePod(PodFault::OutOfDate),
        "a pod that never became ready would block its own repair"
    );
}

#[test]
fn a_pod_that_is_not_ready_is_waited_for_in_the_kubelets_words() {
    let step = step(&desired(), |o| {
        let status = json!({
            "phase": "Pending",
            "conditions": [{ "type": "Ready", "status": "False" }],
            "containerStatuses": [{
                "name": "store", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": { "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } },
            }],
        });
        o.pod.as_mut().unwrap().status = Some(serde_json::from_value(status).unwrap());
        o.store = StoreView::NotAsked;
    });
    let Step::Wait(Wait::PodFailing { detail }) = step else {
        panic!("{step:?}")
    };
    assert!(
        detail.contains("ImagePullBackOff") && detail.contains("no such image"),
        "{detail}"
    );
}

#[test]
fn a_store_that_does_not_answer_is_waited_for() {
    let step = step(&desired(), |o| {
        o.store = StoreView::Unreachable("refused".to_owned());
    });
    assert_eq!(waits(&step), "StoreUnreachable");
}

#[test]
fn a_stranger_behind_the_address_and_a_corrupt_store_stop_everything() {
    let stranger = step(&desired(), |o| {
        o.store = StoreView::Up(ballast_operator::store_client::StoreReport {
            cluster_id: 0xdef,
            ..report()
        });
    });
    assert_eq!(waits(&stranger), "WrongCluster");
    let corrupt = step(&desired(), |o| {
        let report = ballast_operator::store_client::StoreReport {
            corrupt: true,
            ..report()
        };
        o.store = StoreView::Up(report);
    });
    assert_eq!(waits(&corrupt), "Corrupt");
}

/// Size, live bytes, NOSPACE, seconds since the last defragmentation, failures; and the step.
#[test]
fn defragmentation_follows_its_rule() {
    const MIB: i64 = 1 << 20;
    let d = desired();
    let by_rule = Step::Defragment(DefragCause::Rule);
    let for_space = Step::Defragment(DefragCause::NoSpace);
    let rows = [
        (
            "just large and empty enough",
            100 * MIB,
            55 * MIB,
            false,
            None,
            0,
            by_rule.clone(),
        ),
        ("too small", 99 * MIB, MIB, false, None, 0, Step::Idle),
        ("too full", 500 * MIB, 400 * MIB, false, None, 0, Step::Idle),
        (
            "too soon",
            500 * MIB,
            10 * MIB,
            false,
            Some(599),
            0,
            Step::Idle,
        ),
        (
            "late enough",
            500 * MIB,
            10 * MIB,
            false,
            Some(600),
            0,
            by_rule.clone(),
        ),
        (
            "failed a moment ago",
            500 * MIB,
            10 * MIB,
            false,
            None,
            1,
            Step::Idle,
        ),
        (
            "no space, live data would fit",
            1024 * MIB,
            700 * MIB,
            true,
            None,
            0,
            for_space,
        ),
        (
            "no space, live data fills it",
            1024 * MIB,
            950 * MIB,
            true,
            None,
            0,
            Step::Idle,
        ),
        (
            "no space any more",
            900 * MIB,
            890 * MIB,
            true,
            None,
            0,
            Step::DisarmNoSpace,
        ),
    ];
    for (name, size, in_use, no_space, ended, failures, want) in rows {
        let got = step(&d, |o| {
            o.store = StoreView::Up(ballast_operator::store_client::StoreReport {
                db_size: size,
                db_size_in_use: in_use,
                no_space,
                ..report()
            });
            o.history.last_defragmentation = ended.map(|ago| LastDefragmentation {
                time: clock::at(NOW - ago),
                before_bytes: 0,
                after_bytes: 0,
            });
            o.history.defragmentation_failures = failures;
            o.history.last_defragmentation_attempt_time =
                (failures > 0).then(|| clock::at(NOW - 59));
        });
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn defragmentation_can_be_switched_off_and_waits_for_a_backup() {
    let empty = |o: &mut Observed| {
        let report = ballast_operator::store_client::StoreReport {
            db_size_in_use: 1 << 20,
            ..report()
        };
        o.store = StoreView::Up(report);
    };
    assert_eq!(step(&desired(), empty), Step::Defragment(DefragCause::Rule));
    let off = desired_with(json!({ "defragmentation": { "mode": "Disabled" } }));
    assert_eq!(step(&off, empty), Step::Idle);
    let busy = step(&desired(), |o| {
        empty(o);
        o.backups = vec![backup("sample-1", UID, None)];
    });
    assert_eq!(busy, Step::Idle);
}

#[test]
fn a_due_backup_is_created_once_and_named_after_its_moment() {
    let d = desired();
    let at = |now, change: fn(&mut Observed)| {
        step(&d, |o| {
            o.now = now;
            change(o);
        })
    };
    let due = |n: i64| Step::CreateBackup {
        name: format!("sample-2026030100{n:02}00"),
        due: CREATED + 60 * n,
    };
    assert_eq!(at(CREATED + 119, |_| {}), Step::Idle);
    assert_eq!(at(CREATED + 120, |_| {}), due(2));
    assert_eq!(
        at(CREATED + 400, |_| {}),
        due(6),
        "of several missed moments the last"
    );
    assert_eq!(
        at(CREATED + 120, |o| o.backups =
            vec![backup("sample-1", UID, None)]),
        Step::Idle
    );
    assert_eq!(
        at(CREATED + 120, |o| o.backups =
            vec![backup("sample-20260301000200", UID, None)]),
        due(2),
        "a pass that died after the create writes down what it did"
    );
    assert_eq!(
        at(CREATED + 61, |o| o.history.last_schedule_time = None),
        due(1)
    );
}

#[test]
fn no_backup_is_scheduled_while_suspended_or_without_a_schedule() {
    for change in [
        json!({ "backup": { "suspend": true } }),
        json!({ "backup": { "schedule": null } }),
    ] {
        let d = desired_with(change.clone());
        assert_eq!(step(&d, |o| o.now = CREATED + 4000), Step::Idle, "{change}");
    }
}

/// Retention that looked at names or counted failures deleted the last good backup of others.
#[test]
fn retention_counts_successes_of_this_very_store_and_deletes_the_oldest() {
    let d = desired();
    let kept = |names: &[(&str, &str, Option<bool>)]| {
        step(&d, |o| {
            o.backups = names
                .iter()
                .map(|(n, uid, ok)| backup(n, uid, *ok))
                .collect();
        })
    };
    let ok = Some(true);
    let delete = |name: &str| Step::DeleteBackup {
        name: name.to_owned(),
    };
    assert_eq!(kept(&[("s-1", UID, ok), ("s-2", UID, ok)]), Step::Idle);
    assert_eq!(
        kept(&[("s-3", UID, ok), ("s-1", UID, ok), ("s-2", UID, ok)]),
        delete("s-1")
    );
    assert_eq!(
        kept(&[
            ("s-1", UID, ok),
            ("s-2", UID, Some(false)),
            ("s-3", UID, Some(false))
        ]),
        Step::Idle,
        "failed ones do not push out the last good one"
    );
    assert_eq!(
        kept(&[
            ("s-1", "an-older-store", ok),
            ("s-2", UID, ok),
            ("s-3", UID, ok)
        ]),
        Step::Idle
    );
    let by_hand = step(&d, |o| {
        o.backups = ["s-1", "s-2", "s-3"].map(|n| backup(n, UID, ok)).into();
        o.backups[0].metadata.labels = None;
    });
    assert_eq!(
        by_hand,
        Step::Idle,
        "a backup made by hand is nobody's to prune"
    );
    let failed: Vec<_> = ["f-1", "f-2", "f-3", "f-4"]
        .map(|n| (n, UID, Some(false)))
        .into();
    assert_eq!(kept(&failed), delete("f-1"));
}

#[test]
fn a_backup_that_is_going_already_is_not_deleted_again() {
    let step = step(&desired(), |o| {
        o.backups = ["s-1", "s-2", "s-3"]
            .map(|n| backup(n, UID, Some(true)))
            .into();
        o.backups[0].metadata.deletion_timestamp = Some(gone());
    });
    assert_eq!(step, Step::Idle);
}

#[test]
fn a_new_store_waits_for_the_backup_it_is_restored_from() {
    let d = desired_with(json!({
        "bootstrap": { "restore": { "backupRef": { "name": "b" }, "bumpRevision": 5000 } }
    }));
    let new = |change: fn(&mut Observed)| {
        step(&d, |o| {
            o.pod = None;
            o.history.cluster_id = None;
            change(o);
        })
    };
    assert_eq!(waits(&new(|_| {})), "RestoreSourceNotReady");
    for outcome in [None, Some(false)] {
        let step = step(&d, |o| {
            o.pod = None;
            o.history.cluster_id = None;
            o.restore_backup = Some(backup("b", UID, outcome));
        });
        assert_eq!(waits(&step), "RestoreSourceNotReady", "{outcome:?}");
    }
    let source = RestoreSource {
        backup_name: "b".to_owned(),
        claim: "sample-backup".to_owned(),
        path: format!("{UID}/b.db"),
        sha256: "00ff".to_owned(),
        revision: 1000,
        bump_revision: 5000,
    };
    assert_eq!(
        new(|o| o.restore_backup = Some(backup("b", UID, Some(true)))),
        Step::CreatePod(Start::Restore(source))
    );
    assert_eq!(
        step(&d, |o| o.pod = None),
        Step::CreatePod(Start::Existing),
        "a store that ran is never restored over"
    );
}

#[test]
fn a_service_that_somebody_changed_is_put_right() {
    let step = step(&desired(), |o| {
        let spec = o.client_service.as_mut().unwrap().spec.as_mut().unwrap();
        spec.selector = Some([("app".to_owned(), "other".to_owned())].into());
    });
    assert_eq!(step, Step::ApplyService(ServiceKind::Client));
}

#[test]
fn a_volume_grows_last_of_all() {
    let larger = desired_with(json!({ "storage": { "size": "8Gi" } }));
    let mut observed = healthy(&desired());
    assert_eq!(plan(&larger, &observed).step, Step::UpdateVolume);
    observed.now = CREATED + 120;
    assert!(matches!(
        plan(&larger, &observed).step,
        Step::CreateBackup { .. }
    ));
}
