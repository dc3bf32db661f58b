package gate

import (
	"context"
	"fmt"
	"os"
	"strings"
)

// Landed names the last landed revision of the repository that dir is in, to compare its
// working tree with: the merge base with the remote's main branch; if HEAD has landed itself,
// HEAD when the tree has changes, and HEAD's first parent when it has none. Without a remote
// HEAD counts as landed. It is empty, and no error, if there is no such revision: no
// repository, or only one commit.
func Landed(ctx context.Context, dir string) (rev string, err error) {
	git := func(args ...string) (string, bool) {
		out, err := command(ctx, dir, nil, "git", args...)
		return strings.TrimSpace(string(out)), err == nil
	}
	head, ok := git("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
	if !ok {
		return "", ctx.Err()
	}
	for _, branch := range []string{"origin/HEAD", "origin/main", "origin/master"} {
		base, ok := git("merge-base", "HEAD", branch)
		if !ok {
			continue
		}
		if base != head {
			return base, nil
		}
		break
	}
	if changes, ok := git("status", "--porcelain", "--untracked-files=no"); ok && changes != "" {
		return head, nil
	}
	parent, ok := git("rev-parse", "--verify", "--quiet", "HEAD^1^{commit}")
	if !ok {
		return "", ctx.Err() // of a shallow clone, too
	}
	return parent, nil
}

// worktree is a checkout of a revision in a directory of its own.
type worktree struct{ repo, dir string }

// addWorktree checks a revision out into dir, which does not exist yet.
func addWorktree(ctx context.Context, repo, dir, rev string) (*worktree, error) {
	commit, err := command(ctx, repo, nil, "git", "rev-parse", "--verify", "--end-of-options", rev+"^{commit}")
	if err != nil {
		return nil, fmt.Errorf("no revision %q (a shallow clone lacks history: fetch it): %w", rev, err)
	}
	w := &worktree{repo, dir}
	_, err = command(ctx, repo, nil, "git", "worktree", "add", "--detach", "--force", dir, strings.TrimSpace(string(commit)))
	if err != nil {
		w.remove()
		return nil, fmt.Errorf("check out %s: %w", rev, err)
	}
	return w, nil
}

// remove deletes the checkout and what git knows about it, even after an interruption.
func (w *worktree) remove() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	// One that was interrupted while it was made is locked, and git no longer takes it for a
	// worktree: so the directory goes by hand.
	_, _ = command(ctx, w.repo, nil, "git", "worktree", "unlock", w.dir)
	_, _ = command(ctx, w.repo, nil, "git", "worktree", "remove", "--force", w.dir)
	_ = os.RemoveAll(w.dir)
	_, _ = command(ctx, w.repo, nil, "git", "worktree", "prune")
}
