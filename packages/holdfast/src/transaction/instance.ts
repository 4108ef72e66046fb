import {
  type Capabilities,
  type Pattern,
  type Strategy,
  type Support,
  type Unsupported,
  require,
} from "../seam/capabilities.ts";
import type { Connection, Database, Engine, Isolation, Wait } from "../seam/database.ts";
import type { Holder } from "../seam/errors.ts";
import type { LockRequest } from "../seam/key.ts";
import type { Watch } from "../context/section.ts";
import type { Started } from "./lifecycle.ts";
import type { WrongConnectionGuard } from "./wrong-connection.ts";

/** What a transaction needs of the instance it belongs to. */
export interface Instance<Native, C extends Connection> {
  readonly database: Database<Native, C>;
  readonly wait: Wait;
  /** Of its transactions, unless a call says another one. */
  readonly isolation: Isolation;
  /** Watches for what is sent beside its transactions. */
  readonly wrongConnection: WrongConnectionGuard;
  /** Watches what is done while locks are held; absent: nobody does. */
  readonly watch?: Watch | undefined;
  /** As errors and events show them. */
  names(locks: readonly LockRequest[]): string[];
  /** As the server may show them: none if they are not to be seen there. */
  shown(locks: readonly LockRequest[]): string[];
  /** `free`: the connection is in no transaction. */
  capabilities(connection?: C, free?: boolean): Promise<Capabilities>;
  /** The same, if it has been asked before. */
  known(): Capabilities | undefined;
  /** The same, unless it is so long ago that locks may be kept in another way by now. */
  trusted(): Capabilities | undefined;
  /** Asks again, if it is. Throws if this instance keeps locks, or takes its database, otherwise than the others. */
  renewed(connection?: C, free?: boolean): Promise<Capabilities>;
  /** The same for what takes no lock: throws if it takes its database for another one of several than the others do. */
  placed(connection?: C, free?: boolean): Promise<void>;
  /** As errors and events show the name of a row. */
  show(name: string): string;
  holders(locks: readonly LockRequest[], connection?: C): Promise<readonly Holder[]>;
  /** Asks who is in the way, if it can be found out quickly. */
  look(ask: (connection: C) => Promise<readonly Holder[]>, connection?: C): Promise<readonly Holder[]>;
  /** Why no transaction can be opened; undefined: one can. Found out once, by experiment, for a caller that holds no connection. */
  noTransactions(): Promise<Unsupported | undefined>;
  /** An experiment has shown that locks of transactions are none: from now on they are refused. */
  distrust(gap: Unsupported): void;
  /** Whether locks of a session hold: not only what the server says, but what an experiment has shown. */
  sessionSupport(): Promise<Support<Strategy>>;
  /** What goes on in the background until it is stopped, or the instance is closed. */
  readonly started: Started;
  /** Throws if these locks do not belong on this database, where there are several. */
  guard?(locks: readonly LockRequest[]): void;
  /** Whether the calling code is in a transaction of another of these. */
  elsewhere?(): boolean;
}

type StoreOf<C extends Connection, P extends Pattern> = Exclude<Engine<C>[P], Unsupported>;

/**
 * What an engine keeps of a pattern. Throws the reason where it has none, or where this server does not allow it, once that is
 * known: so it is asked for when there is a connection.
 */
export function storeOf<C extends Connection, P extends Pattern>(
  { database, known }: Pick<Instance<unknown, C>, "database" | "known">,
  pattern: P,
  call: string,
): StoreOf<C, P> {
  const facts = known();
  if (facts) require<unknown>(facts[pattern], call);
  return require<unknown>(database.engine[pattern], call) as StoreOf<C, P>;
}
