import type { CallSite } from "../../context/call-site.ts";
import { labelOf, namesMade } from "./statement.ts";

/** One of the functions under test, in one run, and what it sends. */
export interface ActorStep {
  readonly actor: number;
  /** Grows while the rest of the statement arrives. */
  text: string;
  /** Its text without what differs from run to run. */
  readonly label: string;
  readonly place: string | undefined;
  /** Over which connection, as far as there are several. */
  readonly connection: number;
  readonly rows: (readonly string[])[];
  error: string | undefined;
  /** It was ended, since it and others waited for each other. */
  deadlock: boolean;
  /** Rows that were touched, if it is known. */
  affected: number | undefined;
  /** Known to wait for others now. */
  blocked: boolean;
  /** Whom it had to wait for. */
  readonly waitedFor: Set<number>;
  /** A transaction by itself, which is kept open: its COMMIT is a step too. */
  opens: boolean;
  /** It was sent inside of a transaction. */
  inside: boolean;
  /** The transaction that it was sent in is over with it, whatever its text. */
  ends: boolean;
  /** Statements are executed within it, by a function, a procedure or a trigger. */
  acts: boolean;
  /** It is that COMMIT, which nobody sent. */
  readonly implicit: boolean;
  /** It waits for sessions that are no actor's: since when. */
  outside: { readonly since: number; readonly sessions: readonly string[] } | undefined;
}

/** `place`: looked up only when it is shown. */
export function step(
  actor: number,
  text: string,
  place?: string | (() => string | undefined),
  {
    connection = actor,
    implicit = false,
    own = [],
  }: { readonly connection?: number; readonly implicit?: boolean; readonly own?: string[] } = {},
): ActorStep {
  own.push(...namesMade(text).filter((name) => !own.includes(name)));
  const names = own.slice();
  return {
    actor,
    text,
    connection,
    get label() {
      return labelOf(this.text, names);
    },
    get place() {
      return typeof place === "function" ? place() : place;
    },
    rows: [],
    error: undefined,
    deadlock: false,
    affected: undefined,
    blocked: false,
    waitedFor: new Set(),
    opens: false,
    inside: false,
    ends: false,
    acts: false,
    implicit,
    outside: undefined,
  };
}

/** A statement that is held back. */
export interface HeldStatement {
  readonly step: ActorStep;
  /** False: an earlier one of the same connection is not answered yet. */
  ready(): boolean;
  send(): Promise<void> | void;
}

export class Actor {
  readonly index: number;
  readonly name: string;
  readonly held: HeldStatement[] = [];
  /** Not answered yet. */
  readonly sent = new Set<ActorStep>();
  /** Where its promises were made, the last ones. */
  readonly trail: CallSite[] = [];
  /** Neither sends nor ends: it waits for something in this process. */
  asleep = false;
  /** Names that it gave to what it has made in this run: savepoints, temporary tables. */
  readonly own: string[] = [];
  /** The run is over: what comes now is not a part of it. */
  over = false;
  /** Its process has ended: whatever still runs of it reaches nobody. */
  crashed = false;
  result: PromiseSettledResult<unknown> | undefined;

  constructor(index: number, name: string) {
    this.index = index;
    this.name = name;
  }

  /** What it would send if it had the turn. */
  get next(): HeldStatement | undefined {
    return this.held.find((held) => held.ready());
  }

  get blocked(): boolean {
    return [...this.sent].some(({ blocked }) => blocked);
  }

  get done(): boolean {
    return this.result !== undefined && this.held.length === 0 && this.sent.size === 0;
  }
}

/** Whom a statement waits for. */
export interface ActorWait {
  /** Itself too, if it is another of its sessions. */
  readonly actors: readonly number[];
  /** Sessions that are no actor's. */
  readonly outside: readonly string[];
}

/** Where actors run, and what holds their statements back. */
export interface ActorStage {
  /** Lets an actor begin; its statements come to `actor.held`, answered ones leave `actor.sent`. */
  start(actor: Actor): void;
  /** Runs this in the same breath in which the client hears the answer to a step. Absent: it cannot be told when that is. */
  answered?(step: ActorStep, work: () => void): void;
  /** Ends its connections as the end of its process would; resolves when the server knows. */
  crash?(actor: Actor): Promise<void>;
  /** The answer to this one is lost, with the connection. */
  lose?(step: ActorStep): void;
  /** Leases run out. */
  expire?(): Promise<void>;
  /** Gives back locks of sessions that were left behind. */
  unlock?(): Promise<void>;
  /** Called by the stage whenever something has changed. */
  changed: () => void;
  /** Of these statements, which were sent and not answered, those that wait for a lock, and for whom. */
  waiting(steps: readonly ActorStep[]): Promise<ReadonlyMap<ActorStep, ActorWait>>;
  /** Sessions as people know them. */
  describe?(sessions: readonly string[]): Promise<readonly string[]>;
  /** After a run that was given up: ends what is still under way, so that nothing is left locked. */
  clear?(actors: readonly Actor[]): Promise<void>;
  /** Waits until the server has forgotten deleted rows, where locks depend on them: see `Protocol.settle`. */
  readonly settle?: (() => Promise<boolean>) | undefined;
  /** Statements in which others can come in between where nothing is held back. */
  readonly unseen?: ReadonlySet<string>;
  /** Statements of which it was not known whose they are. */
  readonly guessed?: ReadonlySet<string>;
  /** Actors are at work in other processes, whose pools nobody sees. */
  readonly remote?: boolean;
  /** Grows when it is learned that more has to be tried than was until then: what was left out until then is not known to be the same. */
  readonly learned?: number;
  /** Whom a deadlock ends can be chosen. Else the server decides, and at once. */
  readonly victims: boolean;
  /** Whoever tries again what was refused is held back here. Else the schedule sees to it. */
  readonly fair?: boolean;
  /** A transaction was seen that is judged by all that was read, whatever the table. */
  readonly certified?: boolean;
  /** When every actor has had the time to do what it can. Absent: they have, since they are in this thread. */
  caughtUp?(): Promise<void>;
  /** Everybody waits for somebody else. Whether one of them was ended; absent: the server ends one. */
  stuck?(among: readonly Actor[], victim: number | undefined): boolean;
  /** Runs the invariant, whose writes count too. Absent: nobody asks what was written. */
  judge?<T>(work: () => Promise<T>): Promise<T>;
  /** Holds back from here on. `victim`: who is to be ended in a deadlock, where that can be chosen. */
  open(victim: number | undefined): void;
  close(): void;
}
