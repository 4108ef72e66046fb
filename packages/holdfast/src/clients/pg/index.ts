import type { Database, Pinned, Purpose, SqlConnection } from "../../seam/database.ts";
import { NotInTransactionError, UsageError } from "../../seam/errors.ts";
import { OneConnection } from "../../waiting/one-connection.ts";
import { view } from "../../context/revocable.ts";
import {
  type PgClient,
  type PgFactory,
  type PgPool,
  checkOutPg,
  elsewherePg,
  isPgClient,
  isPgPool,
  listenPg,
  observePg,
  observePgStatements,
  pgConnection,
  pgView,
  roomOfPg,
  unwrapPg,
} from "./connection.ts";
import { postgres } from "../../engines/postgres/index.ts";

export type { PgClient, PgPool };

/** What a Pool checks out, or the Client itself. pg declares `connect` twice, hence the pair. */
export type ClientOf<P> = P extends {
  totalCount: number;
  connect(): Promise<infer C>;
  connect(callback: never): void;
}
  ? C
  : P extends { totalCount: number; connect(): Promise<infer C> }
    ? C
    : P;

/** A `pg` Pool, or one connected Client (then transactions queue up for it). */
export function fromPg<Client extends PgPool | PgClient>(
  client: Client,
): Database<ClientOf<Client>, SqlConnection> {
  if (!isPgPool(client) && !isPgClient(client)) {
    throw new UsageError("fromPg(client): this is neither a Pool nor a Client of the package pg");
  }
  const options = (client as { options?: object }).options;
  const database: Database<PgClient, SqlConnection> = {
    engine: postgres,
    traits: {
      client: "pg",
      cancel: true,
      listen: isPgPool(client),
      embedded: false,
      single: !isPgPool(client),
      pinned: true,
      begins: false,
    },
    connect: isPgPool(client) ? (purpose) => checkOutPg(client, options, purpose) : oneClient(client),
    join(native) {
      if (isPgClient(native)) return pgConnection(native, options);
      if (isPgPool(native))
        throw new NotInTransactionError(
          "a Pool runs every statement on another connection; pass the Client that you sent BEGIN on",
        );
      throw new NotInTransactionError("this is no Client of the package pg");
    },
    elsewhere: elsewherePg(client),
    ...(isPgPool(client) && {
      listen: (channel, wake, signal) => listenPg(client as PgPool & PgFactory, channel, wake, signal),
      room: () => roomOfPg(client),
      observe: (seen) => observePg(client, seen),
      openings: (opening) => observePgStatements(client, opening),
    }),
    unwrap: unwrapPg,
  };
  return database as Database<never, SqlConnection>;
}

function oneClient(client: PgClient): (purpose: Purpose) => Promise<Pinned<PgClient, SqlConnection>> {
  const door = OneConnection.of(client);
  return async (purpose) => {
    const leave = await door.enter(purpose);
    const connection = pgConnection(client);
    const own = view(client, pgView);
    return {
      connection,
      native: own.proxy,
      seal() {
        own.seal();
        return own.sent();
      },
      hold: own.hold,
      async release(broken) {
        own.revoke();
        // There is no other connection to go on with: what this one has begun is undone, and it stays in use.
        if (broken && !connection.lost.aborted) await client.query("ROLLBACK").catch(() => {});
        leave();
      },
    };
  };
}
