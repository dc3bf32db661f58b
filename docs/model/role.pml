/* The role of a wire: who may touch a socket and all that belongs to it, how work finds an owner,
   and when the wire's thread may sleep or doze. The code is internal/role; run tools/spin.sh on this file.

   The role word is {owned, pending, drives}. Of drives only "did it change since the thread looked"
   matters, so here it is the bit driven. bed says how the thread rests: AWAKE, NAP, DOZE (a watcher
   looks in its place), SUMMON (a parking waiter wants the thread to take over now), or ASLEEP + the
   instant it sleeps until; cot says the same of the watcher, AWAKE or ASLEEP + until. A token is a
   wake-up, which keeps when nobody sleeps yet (an eventfd, a semaphore): the thread's of its sleep, the
   thread's of its doze, the watcher's.

   Each atomic operation of the code is a step here. Loops around a compare-and-swap are one step, that
   which succeeds or gives up; a load and a compare-and-swap that is not tried again are two.

   Three things are weaker here than in the program, so that the proof holds for more: a packet ends the
   thread's sleep only when it arrives while the socket is armed (edge-triggered), a nap may take any
   time and need not end for a call, and who finds the role owned may give up the seat at once. Left out
   are long naps that a post ends (Hurry), the count of waits without a seat (any wait may do without),
   what a watcher does before there is a thread, and the few milliseconds by which a watcher that claimed
   the packets may oversleep a deadline.

   Time moves only when nothing else can. At each such instant Clock asserts that nothing is stranded:
   no mark, packet, command or due deadline is left, no waiter rests though it has a completion, the role
   is free, and either the thread sleeps on the socket or it dozes and a watcher does. So "eventually"
   below means "without another event, and without time passing, but for naps". Since every process but
   the thread and those who wait for what the others bring is finite, a run that never comes to rest is a
   livelock; the "live" configurations look for those under weak fairness. Without a thread (before Run)
   budgets do not count: NOBUDGET. */

/* PANFLAGS: -DCOLLAPSE -DVECTORSZ=2048 */
/* CONFIG post: -DPOSTERS=2 -DPOSTS=1 -DPOLLERS=1 */
/* CONFIG again: -DPOSTERS=1 -DPOSTS=2 -DPOLLERS=1 -DEPOCHS=1 */
/* CONFIG packet: -DPACKETS=2 -DPOLLERS=1 -DPOLLS=2 -DEPOCHS=1 */
/* CONFIG level: -DPACKETS=2 -DPOLLERS=1 -DPOLLS=2 -DLEVEL */
/* CONFIG timer: -DPOSTERS=2 -DPOSTS=1 -DTIMERS -DEPOCHS=3 */
/* CONFIG wait: -DPACKETS=1 -DPOSTERS=1 -DPOSTS=1 -DWAITER -DNOINLINE big */
/* CONFIG waitone: -DPACKETS=1 -DWAITER */
/* CONFIG waitpoll: -DPACKETS=2 -DPOLLERS=1 -DWAITER big */
/* CONFIG command: -DCOMMANDS=2 -DPOSTERS=1 -DPOSTS=1 -DNOINLINE */
/* CONFIG close: -DCLOSE -DCOMMANDS=1 -DPOSTERS=1 -DPOSTS=1 -DPACKETS=1 big */
/* CONFIG nothread: -DNOTHREAD -DNOBUDGET -DCLOSE -DCOMMANDS=1 -DPOSTERS=1 -DPOSTS=1 */
/* CONFIG live: -DPOSTERS=1 -DPOSTS=1 -DPOLLERS=1 -DNOBUDGET progress fair */
/* CONFIG forever: -DPOSTERS=1 -DPOSTS=2 -DPOLLERS=1 -DFOREVER ltl=served fair */
/* CONFIG livewait: -DPACKETS=1 -DWAITER -DCOMMANDS=1 -DNOBUDGET progress fair */
/* CONFIG watch: -DWATCHERS=1 -DPOSTERS=1 -DPOSTS=1 big */
/* CONFIG watchpacket: -DWATCHERS=1 -DPACKETS=1 */
/* CONFIG claim: -DWATCHERS=1 -DPACKETS=2 -DCLAIM */
/* CONFIG claimpoll: -DWATCHERS=1 -DONESITS -DPACKETS=1 -DPOLLERS=1 -DCLAIM big */
/* CONFIG claimstop: slow -DWATCHERS=1 -DONESITS -DPACKETS=1 -DCOMMANDS=1 -DSTOP -DCLAIM big */
/* CONFIG watchpoll: -DWATCHERS=1 -DONESITS -DPACKETS=1 -DPOLLERS=1 big */
/* CONFIG watchtimer: slow -DWATCHERS=1 -DONESITS -DPOSTERS=1 -DPOSTS=1 -DTIMERS -DEPOCHS=2 big */
/* CONFIG watchstop: -DWATCHERS=1 -DONESITS -DPOSTERS=1 -DPOSTS=1 -DSTOP -DNOINLINE big */
/* CONFIG watchcommand: -DWATCHERS=1 -DCOMMANDS=1 */
/* CONFIG watchpark: slow -DWATCHERS=2 -DONESITS -DPACKETS=1 big */
/* CONFIG hand: -DWATCHERS=2 -DONESITS -DSTOP -DLONGNAP */
/* CONFIG watchclose: slow -DWATCHERS=1 -DONESITS -DCLOSE -DPOSTERS=1 -DPOSTS=1 -DNOINLINE big */
/* CONFIG watchshut: -DWATCHERS=1 -DCLOSE -DSTOP big */
/* CONFIG watchlive: slow -DWATCHERS=1 -DPACKETS=1 -DSTOP progress fair big */
/* CONFIG watchstopall: slow -DWATCHERS=1 -DPOSTERS=1 -DPOSTS=1 -DSTOP big */
/* CONFIG watchcommandall: slow -DWATCHERS=1 -DCOMMANDS=1 -DPACKETS=1 -DNOINLINE big */

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
/* MUTANT nocot @watch: who rings looks for the thread only, though a watcher sleeps */
/* MUTANT latecot @watch: the watcher says that it sleeps only after it released the role */
/* MUTANT cotkept @watchstop: a watcher that could not leave still says that it sleeps */
/* MUTANT cotleft @watchstop: a watcher that got up still says that it sleeps */
/* MUTANT bothsleep @watch: the watcher lets the thread sleep on the same socket */
/* MUTANT bedbeside @watch: the thread goes to bed though a watcher sits */
/* MUTANT idle @watch: a watcher that has just sat down does not look for marks */
/* MUTANT obey @watchcommandall: a watcher that has just sat down does not look for commands */
/* MUTANT unasked @watch: a watcher that has just sat down does not look for what it waits for */
/* MUTANT deaf @watch: a completion does not wake the watcher */
/* MUTANT leftovers @watchstop: the watcher goes, and wakes nobody for the note that was left */
/* MUTANT lateseat @watchstop: Rise looks at bed before it gives up the seat */
/* MUTANT letdoze @watchstop: Rise does not rouse the thread */
/* MUTANT blind @watchstop: the thread dozes without another look at the seat */
/* MUTANT claimkept @claimstop: a watcher that could not leave keeps what it claimed */
/* MUTANT claimleft @claimstop: a watcher that got up does, too */
/* MUTANT cotnudge @watchstop: Nudge wakes only who sleeps already */
/* MUTANT crowd @hand: a waiter sits beside parked ones */
/* MUTANT nohandpark @hand: Park does not call the thread */
/* MUTANT nohandrise @hand: Rise does not call the thread for those who are parked */
/* MUTANT latecount @hand: Park looks at the seat before it counts the waiter */
/* MUTANT uncounted @watchclose: Close does not wait for those about to wake the watcher */
/* MUTANT rashnudge @watchshut: Close does not wait for those about to nudge */
/* MUTANT deadnudge @watchshut: Nudge wakes a watcher of a closed role: who sits too late */
/* MUTANT leaveseated @watchshut: Close does not wait for the watcher to rise */
/* MUTANT letsit @watchshut: Close does not wake the watcher */
/* MUTANT afterlast @watchshut: a watcher that ran the last command releases the role */

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
#define DOZE 2
#define SUMMON 3
#define ASLEEP 4 /* bed and cot are ASLEEP + until */

bool owned, pending, driven; /* the role word; bits of one atomic word */
byte bed = AWAKE;            /* one atomic word */
bool token, rouse;           /* sticky wake-ups of the thread: of its sleep, of its doze */
bool armed, readable;        /* the socket's wake-up, and that it happened */
byte now;                    /* advanced by Clock */

byte packets;                /* in the socket */
bool claimed;                /* by a watcher: steps find none of them */
bool mark;                   /* the poster's ready mark: "this QP is in the wire's list" */
byte work;                   /* posted, not yet taken */
byte deadline = NEVER;       /* the driver's earliest; owner only */
byte cqe[2];                 /* completions in the CQs */
bool bell[2], rung[2];       /* their bells, and the waiters' wake-ups */

bool seat;                   /* taken by a watcher */
byte cot = AWAKE;            /* one atomic word */
bool chair;                  /* sticky wake-up of the watcher */
byte watched = NEVER;        /* the CQ whose completions wake the watcher */
byte waiters;                /* parked without the seat */
bool stop;                   /* waiter 0 should go; set by one without the role */

#define NONE 0
#define QUEUED 1
#define DONE 2
#define FAILED 3
byte cmd[3];                 /* the command list, and what became of each */
#define FINAL 2              /* the last command: close */
bool down;                   /* the last command has shut the driver down */
bool closed;                 /* under the command list's lock */

bool inside;                 /* somebody is in the driver */
bool freed, exited;          /* Close returned; the thread ended */
byte wakers;                 /* about to wake somebody */
bool sleeping, dozing, watching, parked[2]; /* for Clock: who rests, and how */
bool napping, napover;       /* with LONGNAP: a nap lasts until somebody calls, or time passes */

/* What the inlines below use of their process. */
#define LOCALS bool ok, more, w; byte d, n, b, q

/* What cannot be in a configuration is not looked at, which saves states. */
#ifdef CLOSE
#define OVER (cmd[FINAL] == DONE)
#define CLOSED (closed || OVER)
#else
#define OVER false
#define CLOSED false
#endif
#ifdef WATCHERS
#define SEAT seat
#else
#define SEAT false
#endif
#ifdef TIMERS
#define DEADLINE deadline
#else
#define DEADLINE NEVER
#endif

/* Enter and exit the driver: mutual exclusion, and nobody after Close. */
#define ENTER assert(!inside && owned && !OVER && !freed); inside = true
#define EXIT inside = false

/* take: the compare-and-swap of a taker. count: it promises to step. note: it leaves one if owned. */
inline take(count, note) {
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
inline leave() {
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

/* wakers counts those between their compare-and-swap and the wake-up: only Close looks at it. */
#ifdef CLOSE
#define WAKERS(by) wakers = wakers + by
#else
#define WAKERS(by) skip
#endif

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

inline wakechair() {
	atomic { assert(!freed); chair = true }
}

/* kick: wake the watcher, or if none sleeps the thread, if it sleeps until t or longer. Only one
   kicker of a sleep calls Wake. */
inline kick(t) {
#if defined(WATCHERS) && !defined(MUT_nocot)
	b = cot;
	if
	:: b >= ASLEEP -> wakecot(t)
	:: else ->
		b = bed;
		wakebed(t)
	fi
#else
	b = bed;
	wakebed(t)
#endif
}

/* wakecot: b is what was read from cot. */
inline wakecot(t) {
	if
	:: b >= ASLEEP + t ->
#ifndef MUT_uncounted
		WAKERS(1);
#endif
		atomic {
			w = (cot == b);
			if
			:: w -> cot = AWAKE
			:: else
			fi
		}
		if
		:: w -> wakechair()
		:: else
		fi;
#ifndef MUT_uncounted
		WAKERS(-1)
#endif
	:: else
	fi
}

/* wakebed: b is what was read from bed. */
inline wakebed(t) {
	if
	:: b >= ASLEEP + t ->
		WAKERS(1);
		atomic {
			w = (bed == b);
			if
			:: w -> bed = AWAKE
			:: else
			fi
		}
		if
		:: w -> wake()
		:: else
		fi;
		WAKERS(-1)
	:: else
	fi
}

/* handback: the thread takes over at once from a nap or a doze, and takes no nap that it was about to. */
inline handback() {
	WAKERS(1);
	atomic {
		w = (bed == NAP || bed == DOZE);
		bed = (bed < ASLEEP -> SUMMON : bed)
	}
	if
	:: w -> callthread()
	:: else
	fi;
	WAKERS(-1)
}

inline callthread() {
	atomic { assert(!freed); rouse = true }
}

/* nudge: has a watcher ask again; Close wakes the watcher of a closed role. */
inline nudge() {
#ifndef MUT_rashnudge
	WAKERS(1);
#endif
	if
#ifdef MUT_cotnudge
	:: cot >= ASLEEP -> wakechair()
#else
	:: seat ->
#if defined(CLOSE) && !defined(MUT_deadnudge)
		if
		:: !closed -> wakechair()
		:: else
		fi
#else
		wakechair()
#endif
#endif
	:: else
	fi;
#ifndef MUT_rashnudge
	WAKERS(-1)
#endif
}

inline ring() {
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
	:: w -> kick(0)
	:: else
	fi
}

/* complete: a CQE first, then the bell, then the watcher. */
inline complete() {
#if defined(WAITER) || defined(WATCHERS)
#if WATCHERS > 1
	if
	:: q = 0
	:: q = 1
	fi;
#endif
	cqe[q] = cqe[q] + n;
	ringbell(q);
#ifdef WATCHERS
	if
#ifndef MUT_deaf
	:: watched == q ->
#else
	:: watched == q && false ->
#endif
		b = cot;
		if
		:: b >= ASLEEP -> wakecot(0)
		:: else
		fi
	:: else
	fi;
#endif
#endif
	skip
}

inline ringbell(whose) {
	atomic {
		if
		:: bell[whose] -> bell[whose] = false; rung[whose] = true
		:: else
		fi
	}
}

/* step: commands, then the driver's bounded step. more: it stopped because of a bound. */
inline step() {
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
		down = true; /* the driver is shut down here; then whatever still came is failed */
#ifdef WATCHERS
		ringbell(0);
#endif
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
	:: OVER
	:: else ->
#if PACKETS > 0
		atomic { /* a full batch says that there may be more, a short one does not */
			if
			:: packets > 0 && !claimed -> n = 1; packets--; more = true
			:: packets > 0 && !claimed -> n = packets; packets = 0
			:: else
			fi
		};
		if
		:: n > 0 -> complete(); n = 0
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
			transmit()
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
inline transmit() {
#ifdef TIMERS
	if
	:: deadline > now + 1 -> deadline = now + 1
	:: deadline > now + 2 -> deadline = now + 2
	:: true
	fi;
#endif
	if
	:: n > 0 -> complete()
	:: else
	fi
}

/* settle: an owner steps, and leaves. */
inline settle() {
	do
	:: true ->
		step();
		if
		:: OVER -> break /* never released again */
		:: else
		fi;
		if
		:: more
#ifndef NOBUDGET
		:: more -> handover(); break
#endif
		:: else ->
			release();
			if
			:: ok -> break
			:: !ok
#ifndef NOBUDGET
			:: !ok -> handover(); break
#endif
			fi
		fi
	od
}

/* handover: an owner whose budget is spent releases with a note in the word or work left; the
   thread has to look. When it naps it will. */
inline handover() {
	atomic { owned = false; pending = false };
#ifndef MUT_handover
	kick(0);
#endif
	ok = true
}

/* release: leave, then see to it that the thread does not oversleep the earliest deadline. */
inline release() {
	d = DEADLINE;
	leave();
#ifndef MUT_nodeadline
	if
	:: ok && d < NEVER -> kick(d + 1) /* strictly later */
	:: else
	fi
#endif
	skip
}

#ifdef NOTHREAD
init { exited = true }
#else
active proctype Thread() {
	LOCALS;
	bool same, call;

look:
	if
	:: CLOSED -> goto done
	:: else
	fi;
#ifdef MUT_napnote
	take(0, 1);
#else
	take(0, 0);
#endif
	if
	:: !ok -> driven = false; goto nap
	:: else
	fi;
first:
	step();
	if
	:: OVER -> goto done
	:: more -> goto first
	:: else
	fi;
	atomic { same = !driven; driven = false };
	if
#ifdef MUT_bedbeside
	:: same || call -> call = false
#else
	:: (same || call) && !SEAT -> call = false
#endif
	:: else ->
busy:		leave();
		if
		:: ok && same && SEAT -> goto doze
		:: ok && !(same && SEAT) -> goto nap
		:: else
		fi;
rest:		step();
		if
		:: OVER -> goto done
		:: more -> goto rest
		:: else -> goto busy
		fi
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
	step();
	if
	:: OVER -> goto done
	:: more -> goto again
	:: else
	fi;
bedtime:
#ifdef MUT_latebed
	n = DEADLINE;
#else
	atomic { n = DEADLINE; bed = ASLEEP + n };
#endif
	leave();
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
	atomic { call = (bed == SUMMON); bed = AWAKE };
	atomic { armed = false; readable = false };
	goto look;

nap:
	atomic {
		if
		:: bed == SUMMON -> bed = AWAKE; call = true; goto look
		:: else -> bed = NAP
		fi
	}
#ifdef LONGNAP
	napping = true;
end_nap:
	atomic {
		if
		:: rouse -> rouse = false
		:: napover -> napover = false
		fi;
		napping = false
	}
#else
	if
	:: rouse -> rouse = false
	:: true
	fi;
#endif
	atomic { call = (bed == SUMMON); bed = AWAKE };
	goto look;

doze:
#ifdef WATCHERS
	atomic {
		if
		:: bed == SUMMON -> bed = AWAKE; call = true; goto look
		:: else -> bed = DOZE
		fi
	}
#ifndef MUT_blind
	if
	:: seat -> goto eyes
	:: else
	fi;
#else
	goto eyes;
#endif
	atomic {
		if
		:: bed == DOZE -> bed = AWAKE; goto up
		:: else
		fi
	}
eyes:	dozing = true;
end_doze:
	atomic { rouse -> rouse = false; dozing = false }
up:	atomic { call = (bed == SUMMON); bed = AWAKE };
	goto look;
#endif

done:
	exited = true
}
#endif

#if POSTERS > 0
/* Poster: writes its work, marks it, and rings for the first mark; or sends it inline. */
active [POSTERS] proctype Poster() {
	LOCALS;
	byte i;

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
			take(0, 0); /* inline, when nobody owns the wire */
			if
			:: ok ->
				ENTER; n = 1; transmit(); EXIT;
				release();
				if
				:: !ok -> settle()
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
		ring();
		mark = true;
#else
		atomic { ok = mark; mark = true };
		if
		:: !ok ->
			if
			:: true -> ring()
			:: true -> /* or drives itself: a note if it cannot */
				take(1, 1);
				if
				:: ok -> settle()
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
	LOCALS;
	byte i;

	i = 0;
	do
	:: i == POLLS -> break
	:: else ->
		take(1, 0);
		if
		:: ok -> settle()
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
	LOCALS;
	byte got;

	do
	:: got == PACKETS + POSTERS * POSTS -> break
	:: else ->
		take(1, 0);
		if
		:: ok -> settle()
		:: else
		fi;
		atomic { n = cqe[0]; cqe[0] = 0 };
		if
		:: n > 0 -> got = got + n; goto on
		:: else
		fi;
		bell[0] = true;
#ifndef MUT_nopoll
		take(1, 0); /* the second poll: drive, then look */
		if
		:: ok ->
#ifdef MUT_keeprole
			step()
#else
			settle()
#endif
		:: else
		fi;
		atomic { n = cqe[0]; cqe[0] = 0 };
		if
		:: n > 0 -> bell[0] = false; got = got + n; goto on
		:: else
		fi;
#endif
		if
		:: true
		:: true -> handback() /* the thread need not wait for a whole nap without a drive */
		fi;
		parked[0] = true;
		atomic { rung[0] -> rung[0] = false; parked[0] = false };
on:		skip
	od
}
#endif

#ifdef WATCHERS
/* Watcher: takes completions until it is told to stop, and waits for them in the seat or parked. */
#if WATCHERS > 1
#define ME (_pid % 2) /* any two neighbours differ */
#else
#define ME 0
#endif
#ifdef STOP
#define GO ((stop && ME == 0) || down)
#else
#define GO down
#endif
#define ENOUGH (cqe[ME] > 0 || GO)

active [WATCHERS] proctype Watcher() {
	LOCALS;
	bool fresh, met;

again:
	atomic {
		if
		:: GO -> goto gone
		:: else -> cqe[ME] = 0
		fi
	}

	/* Sit */
	if
#ifdef ONESITS
	:: ME == 0
	:: ME == 1 -> goto park
#else
	:: true -> goto park
	:: true
#endif
	fi;
	atomic {
		met = waiters > 0;
#ifndef MUT_crowd
		if
		:: met -> goto park
		:: else
		fi
#endif
	}
	atomic {
		if
		:: seat -> goto park
		:: else -> seat = true
		fi;
		assert(!met)
	}
#ifdef CLOSE
	if
	:: closed -> seat = false; goto park
	:: else
	fi;
#endif
	watched = ME;
	fresh = true;

	/* Watch */
insist:
	atomic {
		if
		:: !owned -> owned = true; driven = true
		:: owned -> goto rise /* after a while */
		:: closed -> goto rise
		fi
	}
look:
	if
	:: !fresh
#ifdef MUT_idle
	:: fresh ->
#else
	:: fresh && mark
	:: fresh && !mark ->
#endif
#if (COMMANDS > 0 || defined(CLOSE)) && !defined(MUT_obey)
		if
		:: cmd[0] == QUEUED || cmd[1] == QUEUED || cmd[FINAL] == QUEUED
		:: else -> more = false; goto unstepped
		fi
#else
		more = false; goto unstepped
#endif
	fi;
	step();
	if
#ifdef MUT_afterlast
	:: OVER -> owned = false; goto rise
#else
	:: OVER -> goto rise /* never released again */
#endif
	:: else
	fi;
unstepped:
#ifdef MUT_unasked
	if
	:: fresh -> goto askednot
	:: else
	fi;
#endif
	if
	:: ENOUGH ->
		if
#ifdef MUT_leftovers
		:: true -> atomic { owned = false; pending = false }
#else
		:: more -> handover()
		:: else ->
			release();
			if
			:: !ok -> handover()
			:: else
			fi
#endif
		fi;
		goto rise
	:: else
	fi;
#ifdef MUT_unasked
askednot:
#endif
	fresh = false;
	if
	:: more -> goto look
	:: else
	fi;
#ifdef MUT_latecot
	d = DEADLINE;
#else
	atomic { d = DEADLINE; cot = ASLEEP + d };
#endif
#ifdef CLAIM
	if /* or not, when there are others who look at the socket */
	:: claimed = true
	:: skip
	fi;
#endif
	leave();
	if
#ifdef MUT_cotkept
	:: !ok -> goto look
#else
	:: !ok ->
#ifndef MUT_claimkept
		claimed = false;
#endif
		cot = AWAKE; goto look
#endif
	:: else
	fi;
#ifdef MUT_latecot
	cot = ASLEEP + d;
#endif
#ifndef MUT_bothsleep
	b = bed;
	wakebed(0);
#endif
	watching = true;
end_watch:
	atomic {
		if
		:: chair -> chair = false
		:: packets > 0
		:: d <= now
		fi;
		watching = false
	}
#ifndef MUT_claimleft
	claimed = false;
#endif
#ifndef MUT_cotleft
	cot = AWAKE;
#endif
	goto insist;

rise:
	atomic { watched = NEVER; assert(cot == AWAKE) }; /* nobody sleeps on a seat that nobody has */
#ifdef MUT_lateseat
	ok = (bed == DOZE);
	seat = false;
#else
	seat = false;
	ok = (bed == DOZE);
#endif
	if
#ifdef MUT_letdoze
	:: ok && false ->
#else
	:: ok ->
#endif
		WAKERS(1);
		atomic {
			w = (bed == DOZE);
			if
			:: w -> bed = AWAKE
			:: else
			fi
		}
		if
		:: w -> callthread()
		:: else
		fi;
		WAKERS(-1)
	:: else
	fi;
#ifndef MUT_nohandrise
	if
	:: waiters > 0 -> handback()
	:: else
	fi;
#endif
	goto again;

park:
	bell[ME] = true;
	if
	:: ENOUGH -> bell[ME] = false; goto again
	:: else
	fi;
#ifdef MUT_latecount
	if
	:: !seat -> handback()
	:: else
	fi;
	waiters++;
#else
	waiters++;
#ifndef MUT_nohandpark
	if
	:: !seat -> handback()
	:: else
	fi;
#endif
#endif
	parked[ME] = true;
end_park:
	atomic { rung[ME] -> rung[ME] = false; parked[ME] = false };
	waiters--;
	goto again;

gone:	skip
}
#endif

#ifdef STOP
/* Stopper: tells waiter 0 to go, as one does who has not the role: its bell, then Nudge. */
active proctype Stopper() {
	LOCALS;

	stop = true;
	ringbell(0);
	nudge()
}
#endif

#if COMMANDS > 0
/* Commander: has its command run under the role by whoever owns it. */
active [COMMANDS] proctype Commander() {
	LOCALS;
	byte me;

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
	take(0, 0);
#else
	take(0, 1);
#endif
	if
	:: ok -> settle()
	:: else
	fi;
	cmd[me] >= DONE;
done:	skip
}
#endif

#ifdef CLOSE
/* Closer: the last command; whoever runs it keeps the role for ever. */
active proctype Closer() {
	LOCALS;

	cmd[FINAL] = QUEUED;
	take(0, 1);
	if
	:: ok -> settle()
	:: else
	fi;
	OVER;
#ifndef MUT_untold
	wake();
	callthread();
#endif
	exited;
#ifdef WATCHERS
#ifndef MUT_leaveseated
	do
	:: seat ->
#ifndef MUT_letsit
		wakechair()
#else
		!seat
#endif
	:: else -> break
	od;
#endif
#endif
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
#ifdef LONGNAP
	:: timeout && napping ->
		assert(waiters == 0 || seat); /* who parks does not wait for the end of a nap */
		napover = true
	:: timeout && !napping ->
#else
	:: timeout ->
#endif
		assert(!parked[0] || cqe[0] == 0);
		assert(!parked[1] || cqe[1] == 0);
		assert(!watching || cqe[watched] == 0);
#ifdef CLOSE
		assert(freed && exited && cmd[0] != QUEUED);
		assert(!seat && !watching);
#else
		assert(sleeping != watching && dozing == watching && seat == watching);
		assert(!owned && !pending);
		assert(!mark && work == 0);
		assert(packets == 0);
		assert(deadline > now);
		assert(cmd[0] != QUEUED && cmd[1] != QUEUED);
#ifdef STOP
		assert(!parked[0] && watched != 0);
#endif
#ifndef WATCHERS
		assert(!parked[0]);
#endif
#endif
		if
		:: now < EPOCHS -> now++
		:: else -> break
		fi
	od
}

/* While a poller polls for ever the thread naps for ever, and what is posted is still sent. */
ltl served { [] (work > 0 -> <> (work == 0)) }
