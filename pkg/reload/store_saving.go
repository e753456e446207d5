package reload

import "maps"

// A Saving is a Save whose long part, Run, needs no other call to wait. It works on a copy of the
// Store's knowledge.
type Saving struct {
	store    *Store
	stored   Stored
	on       Store // the copy
	remade   int   // of the store, at the beginning
	err      error // why the generation is not on disk
	bytesErr error // why the bytes of its rules are not
}

// BeginSave begins to save a generation and the bytes of its rules. Run follows on any goroutine,
// and then End. Until then the Store's owner may save states, lists and notes, but no generation.
// A state names the generation before.
func (s *Store) BeginSave(stored Stored) *Saving {
	w := &Saving{store: s, stored: stored, on: *s, remade: s.remade}
	w.on.until = maps.Clone(s.until)
	return w
}

// Run encodes and writes.
func (w *Saving) Run() {
	if w.err = w.on.Save(w.stored); w.err == nil {
		w.bytesErr = w.on.SaveBytes(w.stored.Generation)
	}
}

// End takes the results of Run into the Store. Its errors are those of Save and SaveBytes. The next
// state names the generation.
func (w *Saving) End() (err, bytesErr error) {
	s, on := w.store, &w.on
	s.written, s.format, s.headers, s.until = on.written, on.format, on.headers, on.until
	s.base, s.rests, s.unwritable = on.base, on.rests, on.unwritable
	s.remade += on.remade - w.remade
	return w.err, w.bytesErr
}
