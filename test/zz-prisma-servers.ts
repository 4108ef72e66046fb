import { startMariadb } from "./harness/mariadb.ts";
import { startMysql } from "./harness/mysql.ts";
import { writeFileSync } from "node:fs";
const a = await startMariadb(); const b = await startMysql();
writeFileSync("/tmp/pm/urls.json", JSON.stringify({ mariadb: a.url, mysql: b.url }));
console.log("up");
process.on("SIGTERM", async () => { await a.stop(); await b.stop(); process.exit(0); });
setInterval(() => {}, 1000);
setTimeout(async () => { await a.stop(); await b.stop(); process.exit(0); }, 3000_000);
