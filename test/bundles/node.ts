import { exact } from "./exact.ts";

void exact(String(process.env["DATABASE_URL"])).then((found) => console.log(JSON.stringify(found)));
