/* The role of a wire: who may touch a socket and all that belongs to it, how work finds an owner,
   and when the wire's thread may sleep. The code is internal/role; run tools/spin.sh on this file.

   The role word is {owned, pending, drives}. Of drives only "did it change since the thread looked"
   matters, so here it is the bit driven. bed says how the thread rests: AWAKE, NAP, SUMMON (a parking
   waiter wants the thread to take over now), or ASLEEP + the instant it sleeps until. token is the
   sleeper's wake-up, which keeps when nobody sleeps yet (an eventfd, a semaphore).

   Two things are weaker here than in a kernel, so that the proof holds for more: a packet ends the
   sleep only when it arrives while the socket is armed (edge-triggered), and a nap may take any time.

   Time moves only when nothing else can. At each such instant Clock asserts that nothing is stranded:
   no mark, packet, command or due deadline is left, no waiter is parked on a completion, the role is
   free. So "eventually" below means "without another event, and without time passing, but for naps".
   Since every process but the thread is finite, a run that never comes to rest is a livelock; the
   "live" configurations look for those under weak fairness. Without a thread (before Run) budgets do not
   count: NOBUDGET. */

/* PANFLAGS: -DCOLLAPSE -DVECTORSZ=2048 */
/* CONFIG post: -DPOSTERS=2 -DPOSTS=1 -DPOLLERS=1 */
/* CONFIG again: -DPOSTERS=1 -DPOSTS=2 -DPOLLERS=1 -DEPOCHS=1 */
/* CONFIG packet: -DPACKETS=2 -DPOLLERS=1 -DPOLLS=2 -DEPOCHS=1 */
/* CONFIG level: -DPACKETS=2 -DPOLLERS=1 -DPOLLS=2 -DLEVEL */
/* CONFIG timer: -DPOSTERS=2 -DPOSTS=1 -DTIMERS -DEPOCHS=3 */
/* CONFIG wait: -DPACKETS=1 -DPOSTERS=1 -DPOSTS=1 -DWAITER -DNOINLINE */
/* CONFIG waitone: -DPACKETS=1 -DWAITER */
/* CONFIG waitpoll: -DPACKETS=2 -DPOLLERS=1 -DWAITER */
/* CONFIG command: -DCOMMANDS=2 -DPOSTERS=1 -DPOSTS=1 -DNOINLINE */
/* CONFIG close: -DCLOSE -DCOMMANDS=1 -DPOSTERS=1 -DPOSTS=1 -DPACKETS=1 */
/* CONFIG nothread: -DNOTHREAD -DNOBUDGET -DCLOSE -DCOMMANDS=1 -DPOSTERS=1 -DPOSTS=1 */
/* CONFIG live: -DPOSTERS=1 -DPOSTS=1 -DPOLLERS=1 -DNOBUDGET progress fair */
/* CONFIG forever: -DPOSTERS=1 -DPOSTS=2 -DPOLLERS=1 -DFOREVER ltl=served fair */
/* CONFIG livewait: -DPACKETS=1 -DWAITER -DCOMMANDS=1 -DNOBUDGET progress fair */

/* MUTANT testset: a taker looks, and takes in a second step */
/* MUTANT nonote: a taker or poster who finds the role owned leaves no note */
/* MUTANT dropnote: the leaver clears the note and goes */
/* MUTANT norecheck: the leaver looks for a note, then releases in a second step */
/* MUTANT ringfirst: a poster rings before it marks */
/* MUTANT marklate @forever: the step clears the mark after it looked for work */
/* MUTANT latebed: the thread says that it sleeps only after it released the role */
/* MUTANT handover: an owner out of budget leaves work and wakes nobody */
/* MUTANT nolook @packet: the thread arms the socket and sleeps without looking again */
/* MUTANT noarm @packet: the thread sleeps with the socket disarmed */
/* MUTANT nosticky: a wake-up before the sleep is forgotten */
/* MUTANT nodeadline @timer: a taker does not wake the thread for an earlier deadline */
/* MUTANT nopoll @waitone: the waiter parks without the second poll */
/* MUTANT keeprole @waitone: the waiter parks with the role in its hands */
/* MUTANT lonecommand @command: a command that finds the role owned leaves no note */
/* MUTANT late @close: commands that come after the last owner are taken and never answered */
/* MUTANT forgetful @close: Close does not answer the commands that are left */
/* MUTANT untold @close: Close does not wake the thread */
/* MUTANT latewake @close: Close does not wait for those about to wake the thread */
/* MUTANT budget @nothread: a budget before there is a thread to hand over to */
/* MUTANT napnote @live: the napping thread leaves notes */

#ifndef POSTERS
#define POSTERS 0
#endif
#ifndef POSTS
#define POSTS 0
#endif
#ifndef POLLERS
#define POLLERS 0
#endif
#ifndef POLLS
#define POLLS 1
#endif
#ifndef PACKETS
#define PACKETS 0
#endif
#ifndef COMMANDS
#define COMMANDS 0
#endif
#ifndef EPOCHS
#define EPOCHS 0
#endif

#ifdef MUT_budget
#undef NOBUDGET
#endif

#define NEVER 9 /* later than every instant */
#define AWAKE 0
#define NAP 1
#define SUMMON 2
#define ASLEEP 3 /* bed is ASLEEP + until */

bool owned, pending, driven; /* the role word; bits of one atomic word */
byte bed = AWAKE;            /* one atomic word */
bool token;                  /* sticky wake-up of the thread */
bool armed, readable;        /* the socket's wake-up, and that it happened */
byte now;                    /* advanced by Clock */

byte packets;                /* in the socket */
bool mark;                   /* the poster's ready mark: "this QP is in the wire's list" */
byte work;                   /* posted, not yet taken */
byte deadline = NEVER;       /* the driver's earliest; owner only */
byte cqe;                    /* completions in the CQ */
bool bell, ring_token;       /* the CQ's bell, and the waiter's wake-up */

#define NONE 0
#define QUEUED 1
#define DONE 2
#define FAILED 3
byte cmd[3];                 /* the command list, and what became of each */
#define FINAL 2              /* the last command: close */
bool closed;                 /* under the command list's lock */

bool inside;                 /* somebody is in the driver */
bool freed, exited;          /* Close returned; the thread ended */
byte wakers;                 /* about to wake the thread */
bool parked, sleeping;       /* for Clock: the waiter parks, the thread sleeps */

/* Enter and exit the driver: mutual exclusion, and nobody after Close. */
#define ENTER assert(!inside && owned && !freed); inside = true
#define EXIT inside = false

/* take: the compare-and-swap of a taker. count: it promises to step. note: it leaves one if owned. */
inline take(count, note, ok) {
#ifdef MUT_testset
	ok = !owned;
	atomic {
		if
		:: ok -> owned = true; driven = driven || count
#else
	atomic {
		if
		:: !owned -> owned = true; driven = driven || count; ok = true
#endif
		:: else ->
#ifndef MUT_nonote
			pending = pending || note;
#endif
			ok = false
		fi
	}
}

/* leave: owned and no note -> free; else take the note and answer false. */
inline leave(ok) {
#ifdef MUT_norecheck
	ok = !pending;
	if
	:: ok -> owned = false
	:: else -> pending = false
	fi
#else
	atomic {
		if
		:: !pending -> owned = false; ok = true
		:: else -> pending = false; ok = false
#ifdef MUT_dropnote
			owned = false; ok = true
#endif
		fi
	}
#endif
}

/* kick: wake the thread if it sleeps until later than t. Only one kicker of a sleep calls Wake. */
inline kick(t, w) {
#ifdef CLOSE
	wakers++;
#endif
	atomic {
		w = false;
		if
		:: bed >= ASLEEP + t -> bed = AWAKE; w = true /* callers pass t+1: strictly later */
		:: else
		fi
	}
	if
	:: w -> wake()
	:: else
	fi;
#ifdef CLOSE
	wakers--
#endif
}

inline wake() {
	atomic {
		assert(!freed);
#ifdef MUT_nosticky
		token = token || sleeping
#else
		token = true
#endif
	}
}

inline ring(w) {
	atomic {
		if
		:: owned ->
#ifndef MUT_nonote
			pending = true;
#endif
			w = false
		:: else -> w = true
		fi
	}
	if
	:: w -> kick(0, w)
	:: else
	fi
}

/* complete: a CQE first, then the bell. */
inline complete(n) {
#ifdef WAITER
	cqe = cqe + n;
	atomic {
		if
		:: bell -> bell = false; ring_token = true
		:: else
		fi
	}
#endif
	skip
}

/* step: commands, then the driver's bounded step. more: it stopped because of a bound. */
inline step(more, n) {
	atomic { ENTER; more = false; n = 0 };
#if COMMANDS > 0 || defined(CLOSE)
	atomic { /* the list is taken under its lock, and run in order */
		if
		:: cmd[0] == QUEUED -> cmd[0] = DONE
		:: else
		fi;
		if
		:: cmd[1] == QUEUED -> cmd[1] = DONE
		:: else
		fi
	}
#endif
#ifdef CLOSE
	if
	:: cmd[FINAL] == QUEUED ->
		skip; /* the driver is shut down here; then whatever still came is failed */
		atomic {
#ifndef MUT_late
			closed = true;
#endif
			cmd[FINAL] = DONE;
#ifndef MUT_forgetful
			if
			:: cmd[0] == QUEUED -> cmd[0] = FAILED
			:: else
			fi;
#endif
		}
	:: else
	fi;
#endif
	if
	:: cmd[FINAL] == DONE
	:: else ->
#if PACKETS > 0
		atomic { /* a full batch says that there may be more, a short one does not */
			if
			:: packets > 0 -> n = 1; packets--; more = true
			:: packets > 0 -> n = packets; packets = 0
			:: else
			fi
		};
		if
		:: n > 0 -> complete(n); n = 0
		:: else
		fi;
#endif
#if POSTERS > 0
		if
		:: mark ->
#ifdef MUT_marklate
			atomic { n = work; work = 0 };
			mark = false;
#else
			mark = false; /* first the mark, then the work */
			atomic { n = work; work = 0 };
#endif
			transmit(n)
		:: else
		fi;
#endif
#ifdef TIMERS
		if
		:: deadline <= now -> deadline = NEVER
		:: else
		fi;
#endif
		skip
	fi;
	EXIT
}

/* transmit: what was sent has a deadline from now on, and is completed at once or by it. */
inline transmit(n) {
#ifdef TIMERS
	if
	:: deadline > now + 1 -> deadline = now + 1
	:: deadline > now + 2 -> deadline = now + 2
	:: true
	fi;
#endif
	if
	:: n > 0 -> complete(n)
	:: else
	fi
}

/* settle: an owner steps, and leaves. d and w are the caller's. */
inline settle(more, ok, d, n, w) {
	do
	:: true ->
		step(more, n);
		if
		:: cmd[FINAL] == DONE -> break /* never released again */
		:: else
		fi;
		if
		:: more
#ifndef NOBUDGET
		:: more -> handover(ok, w); break
#endif
		:: else ->
			release(ok, d, w);
			if
			:: ok -> break
			:: !ok
#ifndef NOBUDGET
			:: !ok -> handover(ok, w); break
#endif
			fi
		fi
	od
}

/* handover: an owner whose budget is spent releases with a note in the word or work left; the
   thread has to look. When it naps it will. */
inline handover(ok, w) {
	atomic { owned = false; pending = false };
#ifndef MUT_handover
	kick(0, w);
#endif
	ok = true
}

/* release: leave, then see to it that the thread does not oversleep the earliest deadline. */
inline release(ok, d, w) {
	d = deadline;
	leave(ok);
#ifndef MUT_nodeadline
	if
	:: ok && d < NEVER -> kick(d + 1, w)
	:: else
	fi
#endif
	skip
}

#ifdef NOTHREAD
init { exited = true }
#else
active proctype Thread() {
	bool ok, more, force;
	byte n;

look:
	if
	:: closed || cmd[FINAL] == DONE -> goto done
	:: else
	fi;
#ifdef MUT_napnote
	take(0, 1, ok);
#else
	take(0, 0, ok);
#endif
	if
	:: !ok -> driven = false; goto nap
	:: else
	fi;
first:
	step(more, n);
	if
	:: cmd[FINAL] == DONE -> goto done
	:: more -> goto first
	:: else
	fi;
	if
	:: driven && !force ->
		driven = false;
busy:		leave(ok);
		if
		:: ok -> goto nap
		:: else
		fi;
rest:		step(more, n);
		if
		:: cmd[FINAL] == DONE -> goto done
		:: more -> goto rest
		:: else -> goto busy
		fi
	:: else -> driven = false; force = false
	fi;

	/* a whole nap without a drive: to bed */
#ifndef MUT_noarm
#ifdef LEVEL
	atomic { armed = true; readable = readable || packets > 0 };
#else
	armed = true;
#endif
#endif
#ifdef MUT_nolook
	goto bedtime;
#endif
again:
	step(more, n);
	if
	:: cmd[FINAL] == DONE -> goto done
	:: more -> goto again
	:: else
	fi;
bedtime:
#ifdef MUT_latebed
	n = deadline;
#else
	bed = ASLEEP + deadline; n = deadline;
#endif
	leave(ok);
	if
	:: !ok -> goto again
	:: else
	fi;
#ifdef MUT_latebed
	bed = ASLEEP + n;
#endif
	sleeping = true;
end_sleep:
	atomic {
		if
		:: token -> token = false
		:: readable
		:: n <= now
		fi;
		sleeping = false
	}
	atomic { force = (bed == SUMMON); bed = AWAKE };
	atomic { armed = false; readable = false };
	goto look;

nap:
	atomic {
		if
		:: bed == SUMMON -> bed = AWAKE; force = true; goto look
		:: else -> bed = NAP
		fi
	}
	if
	:: token -> token = false
	:: true
	fi;
	atomic { force = (bed == SUMMON); bed = AWAKE };
	goto look;

done:
	exited = true
}
#endif

#if POSTERS > 0
/* Poster: writes its work, marks it, and rings for the first mark; or sends it inline. */
active [POSTERS] proctype Poster() {
	bool ok, more, w;
	byte d, n, i;

	for (i : 1 .. POSTS) {
#if EPOCHS > 0
		if
		:: true
		:: now < EPOCHS -> d = now; now > d /* a later instant, when all is at rest */
		fi;
#endif
#ifndef NOINLINE
		if
		:: true ->
			take(0, 0, ok); /* inline, when nobody owns the wire */
			if
			:: ok ->
				ENTER; transmit(1); EXIT;
				release(ok, d, w);
				if
				:: !ok -> settle(more, ok, d, n, w)
				:: else
				fi;
				goto next
			:: else
			fi
		:: true
		fi;
#endif
		work++;
#ifdef MUT_ringfirst
		ring(w);
		mark = true;
#else
		atomic { ok = mark; mark = true };
		if
		:: !ok ->
			if
			:: true -> ring(w)
			:: true -> /* or drives itself: a note if it cannot */
				take(1, 1, ok);
				if
				:: ok -> settle(more, ok, d, n, w)
				:: else
				fi
			fi
		:: else
		fi;
#endif
next:		skip
	}
}
#endif

#if POLLERS > 0
/* Poller: a few polls, without notes; then nobody knows whether it comes back. */
active [POLLERS] proctype Poller() {
	bool ok, more, w;
	byte d, n, i;

	i = 0;
	do
	:: i == POLLS -> break
	:: else ->
		take(1, 0, ok);
		if
		:: ok -> settle(more, ok, d, n, w)
		:: else
		fi;
#ifndef FOREVER
		i++
#endif
	od
}
#endif

#if PACKETS > 0
/* Source: packets arrive; while the socket is disarmed nobody hears them. */
active proctype Source() {
	byte i, d;
	for (i : 1 .. PACKETS) {
#if EPOCHS > 0
		if
		:: true
		:: now < EPOCHS -> d = now; now > d
		fi;
#endif
		atomic { packets++; readable = readable || armed }
	}
}
#endif

#ifdef WAITER
/* Waiter: wants a completion for each packet and post. */
active proctype Waiter() {
	bool ok, more, w;
	byte d, n, got;

	do
	:: got == PACKETS + POSTERS * POSTS -> break
	:: else ->
		take(1, 0, ok);
		if
		:: ok -> settle(more, ok, d, n, w)
		:: else
		fi;
		atomic { n = cqe; cqe = 0 };
		if
		:: n > 0 -> got = got + n; goto on
		:: else
		fi;
		bell = true;
#ifndef MUT_nopoll
		take(1, 0, ok); /* the second poll: drive, then look */
		if
		:: ok ->
#ifdef MUT_keeprole
			step(more, n)
#else
			settle(more, ok, d, n, w)
#endif
		:: else
		fi;
		atomic { n = cqe; cqe = 0 };
		if
		:: n > 0 -> bell = false; got = got + n; goto on
		:: else
		fi;
#endif
		if
		:: true
		:: true -> /* hand back: the thread need not wait for a whole nap without a drive */
#ifdef CLOSE
			wakers++;
#endif
			atomic {
				w = (bed == NAP);
				bed = (bed == NAP || bed == AWAKE -> SUMMON : bed)
			}
			if
			:: w -> wake()
			:: else
			fi
#ifdef CLOSE
			wakers--
#endif
		fi;
		parked = true;
		atomic { ring_token -> ring_token = false; parked = false };
on:		skip
	od
}
#endif

#if COMMANDS > 0
/* Commander: has its command run under the role by whoever owns it. */
active [COMMANDS] proctype Commander() {
	bool ok, more, w;
	byte d, n, me;

	me = _pid % 2; /* any two neighbours differ */
#ifdef CLOSE
	me = 0;
#endif
	atomic {
		if
		:: closed -> goto done
		:: else -> cmd[me] = QUEUED
		fi
	}
#ifdef MUT_lonecommand
	take(0, 0, ok);
#else
	take(0, 1, ok);
#endif
	if
	:: ok -> settle(more, ok, d, n, w)
	:: else
	fi;
	cmd[me] >= DONE;
done:	skip
}
#endif

#ifdef CLOSE
/* Closer: the last command; whoever runs it keeps the role for ever. */
active proctype Closer() {
	bool ok, more, w;
	byte d, n;

	cmd[FINAL] = QUEUED;
	take(0, 1, ok);
	if
	:: ok -> settle(more, ok, d, n, w)
	:: else
	fi;
	cmd[FINAL] == DONE;
#ifndef MUT_untold
	wake();
#endif
	exited;
	bed = AWAKE;
#ifndef MUT_latewake
	wakers == 0;
#endif
	freed = true
}
#endif

/* Clock: when nothing can move, nothing may be left; then time passes. */
active proctype Clock() {
end:
	do
	:: timeout ->
		assert(!parked || cqe == 0);
#ifdef CLOSE
		assert(freed && exited && cmd[0] != QUEUED);
#else
		assert(sleeping && !owned && !pending);
		assert(!mark && work == 0);
		assert(packets == 0);
		assert(deadline > now);
		assert(cmd[0] != QUEUED && cmd[1] != QUEUED);
		assert(!parked);
#endif
		if
		:: now < EPOCHS -> now++
		:: else -> break
		fi
	od
}

/* While a poller polls for ever the thread naps for ever, and what is posted is still sent. */
ltl served { [] (work > 0 -> <> (work == 0)) }
