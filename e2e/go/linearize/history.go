package main

import (
	"fmt"
	"sort"
	"strings"
)

type kv struct {
	Key      string `json:"key"`
	Value    string `json:"value"`
	Create   int64  `json:"create"`
	Modified int64  `json:"modified"`
	Version  int64  `json:"version"`
	Lease    int64  `json:"lease"`
}

type op struct {
	Client    int    `json:"client"`
	Member    int    `json:"member"`
	Kind      string `json:"kind"`
	Key       string `json:"key"`
	End       string `json:"end"`
	Other     string `json:"other"`
	Value     string `json:"value"`
	Lease     int64  `json:"lease"`
	Compare   int64  `json:"compare"`
	Prev      bool   `json:"prev"`
	Call      int64  `json:"call"`
	Back      int64  `json:"back"`
	Known     bool   `json:"known"`
	NoLease   bool   `json:"no_lease"`
	Revision  int64  `json:"revision"`
	Succeeded bool   `json:"succeeded"`
	Deleted   int64  `json:"deleted"`
	Kvs       []kv   `json:"kvs"`

	// found: its outcome was read from the changes, so that only these are held against it.
	found bool
	// keys that a step of nobody in particular deletes.
	keys []string
}

type event struct {
	Deleted bool `json:"deleted"`
	Kv      kv   `json:"kv"`
	Prev    *kv  `json:"prev"`
}

type window struct {
	Number   int     `json:"number"`
	Revision int64   `json:"revision"`
	Kvs      []kv    `json:"kvs"`
	Ops      []op    `json:"ops"`
	Events   []event `json:"events"`
	Begun    int64   `json:"begun"`
	Ended    int64   `json:"ended"`
}

// nobody is the client of steps that no request is known to have made. Porcupine draws a line for each.
const nobody = 1000

// expiring is what keys begin with whose leases are left to run out.
const expiring = "ttl/"

// steps are the operations with known outcomes, and those whose effects were seen; beside them, how many were not.
func (w *window) steps() ([]op, int, error) {
	puts := map[string]int64{}
	byRevision := map[int64][]event{}
	for _, e := range w.Events {
		byRevision[e.Kv.Modified] = append(byRevision[e.Kv.Modified], e)
		if !e.Deleted {
			puts[e.Kv.Value] = e.Kv.Modified
		}
	}
	end := w.Ended + 1
	claimed := map[int64]bool{}
	var steps, lost []op
	unseen := 0
	for _, o := range w.Ops {
		switch {
		case o.Kind == "stale":
		case o.Known:
			if o.effective() {
				claimed[o.Revision] = true
			}
			steps = append(steps, o)
		case o.Kind == "put" || o.Kind == "cas" || o.Kind == "pair":
			revision, there := puts[o.Value]
			if !there {
				unseen++
				continue
			}
			claimed[revision] = true
			o.Known, o.found, o.Succeeded, o.Revision, o.Back = true, true, true, revision, end
			steps = append(steps, o)
		case o.Kind == "delete" || o.Kind == "cas_delete" || o.Kind == "revoke":
			unseen++
			lost = append(lost, o)
		default:
			unseen++
		}
	}
	var rest []int64
	for revision := range byRevision {
		if !claimed[revision] {
			rest = append(rest, revision)
		}
	}
	sort.Slice(rest, func(i, j int) bool { return rest[i] < rest[j] })
	for _, revision := range rest {
		step, err := w.unclaimed(revision, byRevision[revision], lost, end)
		if err != nil {
			return nil, unseen, err
		}
		steps = append(steps, step)
	}
	return steps, unseen, nil
}

// effective tells whether a known operation made a revision of its own, which its answer names.
func (o *op) effective() bool {
	switch o.Kind {
	case "put":
		return !o.NoLease
	case "cas", "pair":
		return o.Succeeded
	case "delete":
		return o.Deleted > 0
	case "cas_delete":
		return o.Succeeded && o.Deleted > 0
	}
	return false
}

// unclaimed is the step that made a revision which no answer names.
func (w *window) unclaimed(revision int64, events []event, lost []op, end int64) (op, error) {
	step := op{Client: nobody, Kind: "gone", Known: true, Revision: revision, Call: end, Back: end}
	leases := map[int64]bool{}
	runsOut := true
	for _, e := range events {
		if !e.Deleted {
			return step, fmt.Errorf("invented: nobody put %+v", e.Kv)
		}
		step.keys = append(step.keys, e.Kv.Key)
		if e.Prev != nil {
			leases[e.Prev.Lease] = true
		}
		runsOut = runsOut && strings.HasPrefix(e.Kv.Key, expiring)
	}
	if runsOut {
		step.Call = w.Begun
	}
	consider := func(o op) {
		if o.Kind == "revoke" {
			if len(leases) != 1 || !leases[o.Lease] {
				return
			}
		} else if len(events) != 1 || events[0].Kv.Key != o.Key {
			return
		}
		step.Call = min(step.Call, o.Call)
	}
	for _, o := range lost {
		consider(o)
	}
	for _, o := range w.Ops {
		if o.Known && o.Kind == "revoke" && !o.NoLease {
			consider(o)
		}
	}
	if step.Call == end {
		return step, fmt.Errorf("invented: nobody deleted %q at revision %d", step.keys, revision)
	}
	return step, nil
}
