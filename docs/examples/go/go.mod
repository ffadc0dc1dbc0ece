module delaylake

go 1.22
