package main

import (
	"fmt"
	"maps"
	"sort"

	"github.com/anishathalye/porcupine"
)

// store is the state. Its maps are never changed, only replaced.
type store struct {
	revision int64
	kvs      map[string]kv
	leases   map[int64]bool
}

func model(w window) porcupine.Model {
	return porcupine.Model{
		Init: func() any {
			s := store{revision: w.Revision, kvs: map[string]kv{}, leases: map[int64]bool{}}
			for _, item := range w.Kvs {
				s.kvs[item.Key] = item
				if item.Lease != 0 {
					s.leases[item.Lease] = true
				}
			}
			return s
		},
		Step: func(state, input, _ any) (bool, any) {
			s, o := state.(store), input.(op)
			return s.step(&o)
		},
		Equal: func(a, b any) bool {
			x, y := a.(store), b.(store)
			return x.revision == y.revision && maps.Equal(x.leases, y.leases) && maps.Equal(x.kvs, y.kvs)
		},
		DescribeOperation: func(input, _ any) string {
			return describe(input.(op))
		},
		DescribeState: func(state any) string {
			s := state.(store)
			return fmt.Sprintf("revision %d: %v, leases %v", s.revision, s.kvs, s.leases)
		},
	}
}

func (s store) step(o *op) (bool, store) {
	before, there := s.kvs[o.Key]
	switch o.Kind {
	case "grant":
		if s.leases[o.Lease] {
			return false, s
		}
		s.leases = with(s.leases, o.Lease, true)
		return true, s
	case "revoke":
		if s.leases[o.Lease] == o.NoLease {
			return false, s
		}
		// Its keys are gone by a step of their own.
		for _, item := range s.kvs {
			if item.Lease == o.Lease {
				return false, s
			}
		}
		s.leases = without(s.leases, o.Lease)
		return true, s
	case "read":
		return s.revision == o.Revision && equal(s.scan(o.Key, o.End), o.Kvs), s
	case "put":
		if o.Lease != 0 && s.leases[o.Lease] == o.NoLease {
			return false, s
		}
		if o.NoLease {
			return true, s
		}
		if o.Revision != s.revision+1 || !o.before(before, there) {
			return false, s
		}
		return true, s.put(o)
	case "delete":
		if !o.before(before, there) || (o.Deleted == 1) != there {
			return false, s
		}
		return s.remove(o)
	case "cas", "cas_delete":
		if o.Succeeded != (before.Modified == o.Compare) {
			return false, s
		}
		if !o.Succeeded {
			return s.revision == o.Revision && equal(s.scan(o.Key, ""), o.Kvs), s
		}
		if o.Kind == "cas_delete" {
			if (o.Deleted == 1) != there {
				return false, s
			}
			return s.remove(o)
		}
		if o.Revision != s.revision+1 {
			return false, s
		}
		return true, s.put(o)
	case "pair":
		if o.Revision != s.revision+1 {
			return false, s
		}
		if _, other := s.kvs[o.Other]; !o.found && (o.Deleted == 1) != other {
			return false, s
		}
		s.kvs = without(s.kvs, o.Other)
		return true, s.put(o)
	case "gone":
		if o.Revision != s.revision+1 {
			return false, s
		}
		for _, key := range o.keys {
			if _, there := s.kvs[key]; !there {
				return false, s
			}
			s.kvs = without(s.kvs, key)
		}
		s.revision++
		return true, s
	}
	return false, s
}

// before tells whether the key before the change is as the answer has it.
func (o *op) before(before kv, there bool) bool {
	if !o.Prev || o.found {
		return true
	}
	if !there {
		return len(o.Kvs) == 0
	}
	return len(o.Kvs) == 1 && o.Kvs[0] == before
}

func (s store) put(o *op) store {
	s.revision++
	item := kv{Key: o.Key, Value: o.Value, Create: s.revision, Modified: s.revision, Version: 1, Lease: o.Lease}
	if before, there := s.kvs[o.Key]; there {
		item.Create, item.Version = before.Create, before.Version+1
	}
	s.kvs = with(s.kvs, o.Key, item)
	return s
}

func (s store) remove(o *op) (bool, store) {
	if o.Deleted == 0 {
		return s.revision == o.Revision, s
	}
	if o.Revision != s.revision+1 {
		return false, s
	}
	s.revision++
	s.kvs = without(s.kvs, o.Key)
	return true, s
}

func (s store) scan(key, end string) []kv {
	if end == "" {
		if item, there := s.kvs[key]; there {
			return []kv{item}
		}
		return nil
	}
	var found []kv
	for k, item := range s.kvs {
		if k >= key && k < end {
			found = append(found, item)
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].Key < found[j].Key })
	return found
}

func equal(a, b []kv) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func with[K comparable, V any](m map[K]V, key K, value V) map[K]V {
	m = maps.Clone(m)
	m[key] = value
	return m
}

func without[K comparable, V any](m map[K]V, key K) map[K]V {
	if _, there := m[key]; !there {
		return m
	}
	m = maps.Clone(m)
	delete(m, key)
	return m
}

func describe(o op) string {
	text := fmt.Sprintf("%s %s", o.Kind, o.Key)
	switch o.Kind {
	case "put", "cas", "pair":
		text += "=" + o.Value
	case "gone":
		text += fmt.Sprint(o.keys)
	case "grant", "revoke":
		text += fmt.Sprint(o.Lease)
	}
	if o.Kind == "cas" || o.Kind == "cas_delete" {
		text += fmt.Sprintf(" if %d: %v", o.Compare, o.Succeeded)
	}
	if len(o.Kvs) > 0 {
		text += fmt.Sprintf(" -> %v", o.Kvs)
	}
	return fmt.Sprintf("%s @%d (member %d)", text, o.Revision, o.Member)
}
