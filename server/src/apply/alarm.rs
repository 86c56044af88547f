//! The alarms in force: replicated, raised and disarmed by command only.
//!
//! etcd: server/etcdserver/api/v3alarm.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_api::etcdserverpb as pb;
use ballast_storage::mvcc::WriteTxn;
use ballast_storage::schema::Table;
use bytes::Bytes;
use parking_lot::Mutex;
use pb::alarm_request::AlarmAction;
use prost::Message;

/// Alarms by type, then by member.
#[derive(Debug, Default)]
pub struct Alarms {
    raised: Mutex<BTreeSet<(i32, u64)>>,
    no_space: AtomicBool,
    corrupt: AtomicBool,
}

impl Alarms {
    /// Replaces everything by the keys of [`Table::Alarm`].
    pub fn load(&self, stored: &[(Bytes, Bytes)]) {
        let mut raised = self.raised.lock();
        raised.clear();
        for (key, _) in stored {
            match pb::AlarmMember::decode(key.clone()) {
                Ok(alarm) => {
                    raised.insert((alarm.alarm, alarm.member_id));
                }
                Err(error) => tracing::error!(error = %error, "cannot read a stored alarm"),
            }
        }
        self.refresh(&raised);
    }

    pub fn no_space(&self) -> bool {
        self.no_space.load(Ordering::Acquire)
    }

    pub fn corrupt(&self) -> bool {
        self.corrupt.load(Ordering::Acquire)
    }

    /// Those of one type, or all for [`pb::AlarmType::None`].
    pub fn get(&self, alarm: i32) -> Vec<pb::AlarmMember> {
        self.raised
            .lock()
            .iter()
            .filter(|(of, _)| alarm == pb::AlarmType::None as i32 || *of == alarm)
            .map(|&(alarm, member_id)| pb::AlarmMember { member_id, alarm })
            .collect()
    }

    /// Applies a request and answers with the alarms it speaks of.
    pub fn apply(&self, txn: &mut WriteTxn<'_>, request: &pb::AlarmRequest) -> pb::AlarmResponse {
        let alarm = pb::AlarmMember {
            member_id: request.member_id,
            alarm: request.alarm,
        };
        let key = alarm.encode_to_vec();
        let mut raised = self.raised.lock();
        let alarms = match AlarmAction::try_from(request.action) {
            Ok(AlarmAction::Get) => {
                drop(raised);
                return pb::AlarmResponse {
                    header: None,
                    alarms: self.get(request.alarm),
                };
            }
            Ok(AlarmAction::Activate) if request.alarm != pb::AlarmType::None as i32 => {
                if raised.insert((request.alarm, request.member_id)) {
                    txn.table_put(Table::Alarm, &key, Bytes::new());
                }
                vec![alarm]
            }
            Ok(AlarmAction::Deactivate) => {
                if raised.remove(&(request.alarm, request.member_id)) {
                    txn.table_delete(Table::Alarm, &key);
                    vec![alarm]
                } else {
                    vec![]
                }
            }
            _ => vec![],
        };
        self.refresh(&raised);
        pb::AlarmResponse {
            header: None,
            alarms,
        }
    }

    fn refresh(&self, raised: &BTreeSet<(i32, u64)>) {
        let has = |alarm: pb::AlarmType| raised.iter().any(|(of, _)| *of == alarm as i32);
        self.no_space
            .store(has(pb::AlarmType::Nospace), Ordering::Release);
        self.corrupt
            .store(has(pb::AlarmType::Corrupt), Ordering::Release);
    }
}
