// Command boltcheck is the judge of our bbolt files: bbolt itself.
//
//	boltcheck check FILE    runs Tx.Check; exit code 1 and the errors when there are any
//	boltcheck churn FILE    writes to, deletes from and again checks a copy's every bucket
//	boltcheck dump FILE     prints "bucket/bucket hex(key) hex(value)" per entry, in order
//	boltcheck make FILE     makes a file with everything a reader must cope with: nested buckets, inline and
//	                        not, overflow pages, free pages, and no free list when FILE ends in ".nofreelist"
package main

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"strings"

	bolt "go.etcd.io/bbolt"
)

func main() {
	if len(os.Args) != 3 {
		fail(fmt.Errorf("usage: boltcheck check|churn|dump|make FILE"))
	}
	path := os.Args[2]
	switch os.Args[1] {
	case "check":
		fail(with(path, &bolt.Options{ReadOnly: true}, check))
	case "churn":
		fail(with(path, nil, churn))
	case "dump":
		fail(with(path, &bolt.Options{ReadOnly: true}, dump))
	case "make":
		fail(with(path, &bolt.Options{NoFreelistSync: strings.HasSuffix(path, ".nofreelist")}, fill))
	default:
		fail(fmt.Errorf("unknown command %q", os.Args[1]))
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func with(path string, options *bolt.Options, do func(*bolt.DB) error) error {
	db, err := bolt.Open(path, 0o600, options)
	if err != nil {
		return err
	}
	defer db.Close()
	return do(db)
}

func check(db *bolt.DB) error {
	return db.View(func(tx *bolt.Tx) error {
		var errors []string
		for err := range tx.Check() {
			errors = append(errors, err.Error())
		}
		if len(errors) > 0 {
			return fmt.Errorf("%d errors:\n%s", len(errors), strings.Join(errors, "\n"))
		}
		return nil
	})
}

// churn makes bbolt rebalance and split the pages it finds.
func churn(db *bolt.DB) error {
	for round := range 4 {
		err := db.Update(func(tx *bolt.Tx) error {
			return tx.ForEach(func(_ []byte, b *bolt.Bucket) error {
				var doomed [][]byte
				i := 0
				err := b.ForEach(func(k, _ []byte) error {
					// Runs of deletes empty whole pages.
					if (i/200)%4 == round {
						doomed = append(doomed, append([]byte(nil), k...))
					}
					i++
					return nil
				})
				if err != nil {
					return err
				}
				for _, k := range doomed {
					if err := b.Delete(k); err != nil {
						return err
					}
				}
				for j := range 50 {
					if err := b.Put(fmt.Appendf(nil, "churn-%d-%d", round, j), make([]byte, j*100)); err != nil {
						return err
					}
				}
				return nil
			})
		})
		if err != nil {
			return err
		}
		if err := check(db); err != nil {
			return fmt.Errorf("after round %d: %w", round, err)
		}
	}
	return nil
}

func dump(db *bolt.DB) error {
	return db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			return dumpBucket(string(name), b)
		})
	})
}

func dumpBucket(path string, b *bolt.Bucket) error {
	return b.ForEach(func(k, v []byte) error {
		if v == nil {
			return dumpBucket(path+"/"+string(k), b.Bucket(k))
		}
		_, err := fmt.Println(path, hex.EncodeToString(k), hex.EncodeToString(v))
		return err
	})
}

func fill(db *bolt.DB) error {
	err := db.Update(func(tx *bolt.Tx) error {
		// etcdutl wants the second.
		for _, name := range []string{"empty", "meta"} {
			if _, err := tx.CreateBucket([]byte(name)); err != nil {
				return err
			}
		}
		for name, size := range map[string]int{"few": 3, "some": 100, "many": 20000} {
			b, err := tx.CreateBucket([]byte(name))
			if err != nil {
				return err
			}
			if err := numbers(b, size, 40); err != nil {
				return err
			}
		}
		large, err := tx.CreateBucket([]byte("large"))
		if err != nil {
			return err
		}
		if err := numbers(large, 30, 30000); err != nil {
			return err
		}
		for _, name := range []string{"inner-few", "inner-many"} {
			inner, err := large.CreateBucket([]byte(name))
			if err != nil {
				return err
			}
			if err := numbers(inner, map[string]int{"inner-few": 2, "inner-many": 3000}[name], 30); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	// A later transaction leaves free pages behind.
	return db.Update(func(tx *bolt.Tx) error {
		many := tx.Bucket([]byte("many"))
		for i := range 7000 {
			if err := many.Delete(binary.BigEndian.AppendUint32(nil, uint32(i*2))); err != nil {
				return err
			}
		}
		return nil
	})
}

func numbers(b *bolt.Bucket, count, valueSize int) error {
	for i := range count {
		value := make([]byte, valueSize+i%7)
		binary.BigEndian.PutUint32(value, uint32(i))
		if err := b.Put(binary.BigEndian.AppendUint32(nil, uint32(i)), value); err != nil {
			return err
		}
	}
	return nil
}
