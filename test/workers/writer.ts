/** Inserts numbers into a table until its standard input ends, and tells each that was committed. */
import { setTimeout as sleep } from "node:timers/promises";
import mysql from "mysql2/promise";
import { Client } from "pg";

const [url = "", table = "", how] = process.argv.slice(2);

interface Connection {
  insert(n: number): Promise<unknown>;
  end(): Promise<unknown>;
}

async function open(): Promise<Connection> {
  if (url.startsWith("postgres")) {
    const client = new Client({ connectionString: url, application_name: "live writer" });
    await client.connect();
    return {
      insert: (n) => client.query(`INSERT INTO ${table} (n) VALUES ($1)`, [n]),
      end: () => client.end(),
    };
  }
  const connection = await mysql.createConnection(url);
  return {
    insert: (n) => connection.query(`INSERT INTO ${table} (n) VALUES (?)`, [n]),
    end: () => connection.end(),
  };
}

let over = false;
process.stdin.resume().on("end", () => (over = true));

let connection = await open();
for (let n = 1; !over; n++) {
  await connection.insert(n);
  process.stdout.write(`${n}\n`);
  if (how === "anew") {
    await connection.end();
    await sleep(5);
    connection = await open();
  } else await sleep(2);
}
await connection.end();
process.exit();
