/*
 * doorbell.pml: the deferred doorbell of qp/gate.go, qp/sendqueue.go and qp/recvqueue.go.
 *
 * Posters reserve slots, write entries, publish them and look at the state again. One
 * process owns the wire: it takes, sends, flushes, forgets and retires entries, changes
 * the state, and sleeps when there is nothing to do. Whoever holds the wire's role does
 * all of this in the program too, so owner and transitions exclude each other here as
 * there, and what only the owner sees is one step with what it does next. Everything that
 * posters and owner share is a step of its own. SPIN explores sequentially consistent
 * memory, which is what Go's sync/atomic promises.
 *
 * What is checked, by the numbers of docs/DESIGN.md:
 *
 *   D2  an entry is read only when completely written, sent only in RTS
 *   D3  entries leave in the order of their positions, each position is one post's
 *   D4  at quiescence nothing published stays behind where it should have gone; an entry
 *       is disposed of once
 *   D5  a chain is visible whole when its first entry is
 *   D6  an entry of an earlier life is never sent; it is flushed if SQE or ERR ended its
 *       life, forgotten if RESET did; nothing is reserved in RESET or INIT
 *   D7  reserved <= retired + depth; a slot is reused only after it was retired
 *
 * Run with tools/spin.sh, which explains the lines below.
 */

/* CONFIG rts: -DPOSTERS=3 -DDEPTH=3 -DMOVES=1 -DTO_ERR big */
/* CONFIG reuse: -DMOVES=5 -DTO_RESET big */
/* CONFIG sqe: -DSTART=RTS -DMOVES=5 -DTO_SQE -DTO_SQD big */
/* CONFIG full: -DSTART=RTS -DPOSTERS=3 -DCHAINS=2 -DMOVES=1 -DTO_ERR big */
/* CONFIG laps: -DSTART=RTS -DPOSTS=3 -DMOVES=0 big */
/* CONFIG all: -DMOVES=4 -DTO_ERR -DTO_RESET -DTO_SQE -DTO_SQD big */
/* CONFIG recv: -DRECV -DMOVES=3 -DTO_ERR -DTO_RESET big */
/* CONFIG all5: slow -DMOVES=5 -DTO_ERR -DTO_RESET -DTO_SQE -DTO_SQD */
/* CONFIG reuse2: slow -DPOSTS=2 -DMOVES=4 -DTO_RESET */

/* MUTANT norecheck: the poster does not look at the state again after publish */
/* MUTANT early: publish before write */
/* MUTANT firstfirst: a chain is published first slot first */
/* MUTANT gap: the owner steps over a slot that is not readable yet */
/* MUTANT nolook: the owner does not look again before it sleeps */
/* MUTANT lateclear: the ready mark is cleared after the queue was looked at */
/* MUTANT noring: the move to RTS does not ring */
/* MUTANT inrtr: the owner sends in RTR */
/* MUTANT nocut @reuse: RESET records no cut */
/* MUTANT cutbefore @reuse: the cut is read before the state changes, not in the same step */
/* MUTANT twowords @reuse: the state is checked in a step before reserving */
/* MUTANT freeall @reuse: RESET frees slots that posters still write */
/* MUTANT nosqecut @sqe: leaving SQE records no cut */
/* MUTANT notsealed @sqe: the poster of a sealed slot does not ring while the gate is closed */
/* MUTANT freetaken @full: slots are free when taken, not when retired */
/* MUTANT recvnocheck @recv: the receive queue does not look at the state again */
/* MUTANT recvnocut @recv: the receive queue records no cut */

#ifndef POSTERS
#define POSTERS 2
#endif
#ifndef CHAINS
#define CHAINS 1		/* posters 0..CHAINS-1 post chains of 2, the others single entries */
#endif
#ifndef POSTS
#define POSTS 1			/* calls each poster makes */
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef START
#define START RTR
#endif
#ifndef MOVES
#define MOVES 1			/* transitions, at most */
#endif

/* The states. Transitions to RTS are always allowed, others as TO_ERR and so on say. */
#define RESET 0
#define INIT 1
#define RTR 2
#define RTS 3
#define SQD 4
#define SQE 5
#define ERR 6

/* Fates that are sealed with the end of a life; OPEN is also what positions begin with. */
#define OPEN 0
#define FLUSH 1
#define FORGET 2

/* Positions that can ever be reserved. */
#define TOTAL (POSTERS*POSTS + CHAINS*POSTS)

/* What posters take for the end of the free slots. */
#ifdef MUT_freetaken
#define FREED taken
#else
#define FREED retired
#endif

/* The queue word: reserved count above the state. */
#define STATE(c) ((c) & 7)
#define POS(c) ((c) >> 3)
#define CTL(pos, st) (((pos) << 3) | (st))

#ifdef RECV
#define refused(st) ((st) == RESET)
#define rings(st) ((st) == ERR)
#define usable(st) ((st) == RTR || (st) == RTS || (st) == SQD || (st) == SQE)
#define flushes(st) ((st) == ERR)
#else
#define refused(st) ((st) == RESET || (st) == INIT)
#define rings(st) ((st) != RTR && (st) != SQD)
#ifdef MUT_inrtr
#define usable(st) ((st) == RTS || (st) == RTR)
#else
#define usable(st) ((st) == RTS)
#endif
#define flushes(st) ((st) == ERR || (st) == SQE)
#endif

/* Shared by posters and owner. */
byte ctl = CTL(0, START);
byte retired;
byte seq[DEPTH];		/* position + 1 */
byte entry[DEPTH];		/* what was written: the position it is for + 1 */
byte cut;			/* flushCut for the posters: positions below are sealed */
bool ready;			/* the queue pair is marked ready on its wire */
bool asleep;			/* the owner sleeps or is about to */

/* The owner's. */
byte taken;
byte resetCut, flushCut;	/* resetCut <= flushCut */
byte moves;

/* What the specification remembers. */
byte doom[TOTAL];		/* what the end of its life made of this position */
bool second[TOTAL];		/* this position follows another of its chain */
byte disposed;			/* next position that may leave */
byte user[DEPTH];		/* whose slot it is: position + 1 */
byte done;			/* posters that have returned for good */

/* SendQueue.Post and RecvQueue.Post: chains of "chain" entries, POSTS times. */
proctype Poster(byte chain) {
	byte c, posts, took, pos, i;

next:	atomic {
		c = 0; took = 0; pos = 0; i = 0;
		if
		:: posts == POSTS -> done++; goto out
		:: else -> posts++
		fi
	};

	/* gate.reserve */
#ifdef MUT_twowords
	if
	:: refused(STATE(ctl)) -> goto next
	:: else
	fi;
#endif
again:	atomic {
		c = ctl;
		pos = POS(c);
#ifndef MUT_twowords
		if
		:: refused(STATE(c)) -> goto next
		:: else
		fi
#endif
	};
	atomic {	/* retired may have passed pos: then there seems to be more room than there is */
		took = (pos + chain <= FREED + DEPTH -> chain : FREED + DEPTH - pos);
		if
		:: took > 0
		:: took == 0 -> goto next			/* ErrQueueFull; the caller gives up */
		:: took == 0 && rings(STATE(c)) -> goto wait	/* or waits for room */
		fi
	};
	atomic {
		if
		:: ctl == c ->
			assert(!refused(STATE(c)) && pos + took <= retired + DEPTH);
			ctl = CTL(pos + took, STATE(c));
			do
			:: i < took ->
				assert(user[(pos + i) % DEPTH] == 0);
				user[(pos + i) % DEPTH] = pos + i + 1;
				second[pos + i] = (i > 0);
				i++
			:: else -> i = 0; break
			od;
#if !defined(MUT_norecheck) && !defined(MUT_recvnocheck)
			c = 0
#endif
		:: else -> goto again
		fi
	};

#ifdef MUT_early
	do
	:: i < took -> seq[(pos + i) % DEPTH] = pos + i + 1; i++
	:: else -> i = 0; break
	od;
#endif
	/* SendQueue.write */
	do
	:: atomic {
		assert(user[(pos + i) % DEPTH] == pos + i + 1);
		entry[(pos + i) % DEPTH] = pos + i + 1;
		i++;
		if
		:: i == took -> break
		:: else
		fi
	   }
	od;

	/* gate.publish: the first slot last */
#if defined(MUT_firstfirst)
	i = 0;
	do
	:: i < took -> seq[(pos + i) % DEPTH] = pos + i + 1; i++
	:: else -> break
	od;
#elif !defined(MUT_early)
	do
	:: atomic {
		i--;
		seq[(pos + i) % DEPTH] = pos + i + 1;
		if
		:: i == 0 -> took = 0; break
		:: else
		fi
	   }
	od;
#endif
	/* The re-check: ring, unless the gate is closed and the entry belongs to this life. */
	atomic {
#if !defined(MUT_norecheck) && !defined(MUT_recvnocheck)
		c = ctl;
#endif
		if
		:: rings(STATE(c)) -> goto bell
		:: else
		fi
	};
#ifdef MUT_notsealed
	goto next;
#endif
	atomic {
		if
		:: pos < cut
		:: else -> goto next
		fi
	};

	/* The doorbell: mark the queue pair ready, wake the owner if it sleeps. */
bell:	ready = true;
	atomic {
		asleep = false;
		goto next
	};

wait:	atomic {
		(POS(ctl) < retired + DEPTH || !rings(STATE(ctl))) ->
		took = 0;
		goto again
	};
out:	skip
}

/* leave: the position at taken leaves the queue; what must hold whatever its fate is. */
inline leave(rightly) {
	assert(taken == disposed && entry[taken % DEPTH] == taken + 1 && (rightly));
	assert(taken + 1 >= POS(ctl) || !second[taken + 1] || seq[(taken + 1) % DEPTH] == taken + 2);
	doom[taken] = OPEN;
	second[taken] = false;
	taken++;
	disposed++;
	/* Cuts that were passed change nothing any more: forget their history. */
	resetCut = (resetCut > taken -> resetCut : 0);
	flushCut = (flushCut > taken -> flushCut : 0)
}

/* free: the n oldest slots go back to the posters. */
inline free(n) {
	do
	:: i < (n) -> user[(retired + i) % DEPTH] = 0; i++
	:: else -> break
	od;
	retired = retired + i;
	i = 0
}

/* The owner of the wire. */
proctype Owner() {
	byte to, end, i;
	bool more;		/* the queue pair was ready and next has not said "wait" yet */

top:	do
	/* An acknowledgement: the oldest entry sent completes. */
	:: atomic { retired < taken -> free(1) }

	/* A transition, under the role: SendQueue.move, then a ring. */
	:: moves < MOVES ->
move:	   atomic {
		moves++;
		if
		:: STATE(ctl) == RESET -> to = INIT
		:: STATE(ctl) == INIT -> to = RTR
		:: STATE(ctl) == RTR || STATE(ctl) == SQD || STATE(ctl) == SQE -> to = RTS
#ifdef TO_SQD
		:: STATE(ctl) == RTS -> to = SQD
#endif
#ifdef TO_SQE
		:: STATE(ctl) == RTS -> to = SQE
#endif
#ifdef TO_ERR
		:: STATE(ctl) != RESET && STATE(ctl) != ERR -> to = ERR
#endif
#ifdef TO_RESET
		:: STATE(ctl) != RESET -> to = RESET
#endif
		:: else -> moves = MOVES; goto top	/* there is none */
		fi;
		end = POS(ctl);
#ifdef MUT_cutbefore
	   };
	   atomic {
#endif
		if
		:: to == RESET || STATE(ctl) == SQE && to == RTS ->
			/* What the specification says about everything that was posted by now. */
			i = disposed;
			do
			:: i < POS(ctl) ->
				doom[i] = (to == RESET -> FORGET : (doom[i] == OPEN -> FLUSH : doom[i]));
				i++
			:: else -> i = 0; break
			od
		:: else -> end = 0		/* not the end of a life */
		fi;
		ctl = CTL(POS(ctl), to);
		if
#if !defined(MUT_nocut) && !defined(MUT_recvnocut)
		:: to == RESET -> resetCut = end; flushCut = end
#endif
#ifndef MUT_nosqecut
		:: to == RTS && end > 0 -> flushCut = end
#endif
		:: else -> end = 0
		fi
	   };
	   if
	   :: atomic { end > 0 -> cut = end; end = 0 }
	   :: else
	   fi;
	   if
#ifdef MUT_freeall
	   :: atomic { to == RESET -> free(POS(ctl) - retired) }
#else
	   :: atomic { to == RESET && retired < taken -> free(taken - retired) }
#endif
	   :: else
	   fi;
	   atomic {
#ifdef MUT_noring
		ready = ready || (to != RTS);
#else
		ready = true;
#endif
		to = 0
	   }

	/* The peer's requests make the wire look too, without a mark. */
	:: atomic { !more -> more = true }

	/* A step of the wire: take the mark, then look at the oldest entry. */
	:: atomic {
		!more && ready ->
#ifndef MUT_lateclear
		ready = false;
#endif
		more = true
	   }

	:: more ->
	   atomic {
		if
#ifdef MUT_gap
		:: taken < POS(ctl) && seq[taken % DEPTH] != taken + 1 && seq[(taken + 1) % DEPTH] == taken + 2 ->
			taken++
#endif
		:: seq[taken % DEPTH] != taken + 1 -> more = false		/* FateWait */
		:: else ->
			if
			:: taken < resetCut ->
				leave(doom[taken] == FORGET);
				assert(retired + 1 == taken);
				free(1)
			:: taken >= resetCut && (taken < flushCut || flushes(STATE(ctl))) ->
				if
				:: retired < taken -> free(1)		/* those before it first */
				:: else -> leave(doom[taken] == FLUSH || doom[taken] == OPEN && flushes(STATE(ctl))); free(1)
				fi
			:: taken >= flushCut && usable(STATE(ctl)) ->
#ifdef RECV
				more = false				/* until a message comes */
#else
				leave(doom[taken] == OPEN && STATE(ctl) == RTS)
#endif
			:: else -> more = false				/* the gate is closed */
			fi
		fi
	   };
#ifdef MUT_lateclear
	   if
	   :: !more -> ready = false
	   :: else
	   fi
#endif

#ifdef RECV
	/* A message arrives for the oldest receive. */
	:: atomic { usable(STATE(ctl)) && taken >= resetCut && seq[taken % DEPTH] == taken + 1 -> leave(doom[taken] == OPEN) }
#endif

	/* Nothing to do: say that we sleep, look again, sleep until rung. */
	:: !more && !ready ->
	   asleep = true;
#ifndef MUT_nolook
	   if
	   :: atomic { ready -> asleep = false; goto top }
	   :: else
	   fi;
#endif
	   if
	   :: !asleep
	   :: atomic { moves < MOVES -> asleep = false; goto move }	/* by another goroutine */
	   :: atomic { retired < taken -> asleep = false; free(1) }	/* a packet came */
	   :: atomic {
		asleep && done == POSTERS && retired == taken ->
		/* Quiescence: no poster will ever ring again. */
		assert(taken == disposed && taken >= flushCut);
		assert(taken == POS(ctl) || !rings(STATE(ctl)));
		if
		:: moves == MOVES -> break
		:: else -> asleep = false; goto move
		fi
	      }
	   fi
	od
}

init {
	byte n;

	atomic {
		run Owner();
		do
		:: n < POSTERS -> run Poster((n < CHAINS -> 2 : 1)); n++
		:: else -> break
		od
	}
}
